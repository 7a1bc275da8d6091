"""Proves at start that a model gives the same logits through the attention that will serve it.

At load PyTorch's attention answers another question: whether packed sequences can compute this model at all. A kernel
that is wrong on one device, or for one width of heads, would pass that and fail in front of a user. So where something
else serves (Triton on a GPU), the same two sequences go through it too, over pages of their own.

Both are asked over keys as they are computed. Where a pool will store codes, a third question is asked of whatever
serves, PyTorch's attention too: whether it writes and reads them as their format says (`core.models.checked_codes`).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from core.attention.base import AttentionBackend
from core.attention.torch_native import TorchNativeAttention
from core.errors import ConfigError
from core.memory.kv_format import KVFormat
from core.models.base import Model

if TYPE_CHECKING:
    from core.models.hf.self_check import CheckResult

logger = logging.getLogger(__name__)

PLAINLY = "--kv-cache-dtype auto serves this model, over keys as they are computed"
INSTEAD = "--attention-backend torch_native serves this model, slowly"


def prove_attention(model: Model, attention: AttentionBackend) -> None:
    """Compare `model` through `attention` with the logits that it was proved by at load. Leaves small pools bound.

    Nothing is compared where PyTorch's attention serves, which it was proved with, nor for a model that was not loaded
    (of a benchmark). Raises ConfigError, in one line, where logits differ or a kernel cannot run.
    """
    proved_by: Any = getattr(model, "reference", None)
    if proved_by is None or isinstance(attention, TorchNativeAttention):
        return
    name = type(attention).__name__
    try:
        result = _check(model, proved_by, attention)
    except Exception as error:  # Of a compiler or a driver: their errors have no class in common.
        what = str(error).partition("\n")[0] or type(error).__name__
        raise ConfigError(f"attention by {name} cannot compute {model.spec.architecture}: {what}; {INSTEAD}") from error
    if not result.passed:
        raise ConfigError(
            f"attention by {name} gives {model.spec.architecture} other logits than PyTorch's: by {result.error:.2g} "
            f"of the largest (at most {result.tolerance:g} is rounding); {INSTEAD}"
        )
    logger.info("proved through %s: logits within %.1g of the largest", name, result.error)


def prove_codes(model: Model, attention: AttentionBackend, format: KVFormat) -> None:
    """Run `model` through `attention` over a small pool of codes, and compare what is written and what is read.

    Nothing is compared where `format` has no codes, nor for a model that was not loaded. Leaves that pool bound. Raises
    ConfigError, in one line, where bytes or outputs differ or a kernel cannot run.
    """
    proved_by: Any = getattr(model, "reference", None)
    # A compiled decoder reads pages by itself: it was proved over such codes when it was made.
    if proved_by is None or format.codes is None or getattr(model, "native", False):
        return
    from core.models.checked_codes import CheckedCodes, WrongCodes
    from core.models.hf.self_check import packed_steps, small_pool

    name, spec = type(attention).__name__, model.spec
    pool = small_pool(spec, proved_by.ids[0].device, format)
    try:
        steps = sum(1 for _ in packed_steps(model, proved_by.ids, pool, CheckedCodes(attention, pool)))
    except WrongCodes as wrong:
        what = f"{wrong} of {spec.architecture} than {format.name} says"
        raise ConfigError(f"attention by {name} {what}; {PLAINLY}") from wrong
    except Exception as error:  # As above.
        what = str(error).partition("\n")[0] or type(error).__name__
        raise ConfigError(
            f"attention by {name} cannot compute {spec.architecture} over {format.name}: {what}; {PLAINLY}"
        ) from error
    logger.info("proved through %s: %d steps write and read %s as it is defined", name, steps, format.name)


def _check(model: Any, proved_by: Any, attention: AttentionBackend) -> CheckResult:
    # A model with a reference has imported transformers; an engine of a benchmark must not.
    from core.models.encoder_decoder.self_check import EncoderReference, check_encoder_decoder
    from core.models.hf.self_check import run_self_check

    if isinstance(proved_by, EncoderReference):
        return check_encoder_decoder(model, proved_by, attention)
    return run_self_check(model, proved_by, attention)
