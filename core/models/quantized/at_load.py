"""Plain weights that are quantised while they are loaded, because the server was told to.

int8 and int4 are of weights only, and not of what they are multiplied with. int8: one scale per output, symmetric, as
torchao does it (`Int8WeightOnlyConfig`), and transformers computes with its product. int4: a scale and a zero for each
output and 128 inputs (`rounding.py`). fp8: eight-bit floats, of what they are multiplied with too (`fp8.py`). Every
linear layer is quantised, the output matrix too. What expands latents stays as it is, or keys and values would be kept
expanded (`mla.py`); so does what makes step sizes in Mamba-1, whose weight is read where no layer is called; so does
what chooses experts, which is small and decides much; and so do embeddings, which are looked up, not read as a whole.
Dense models on the CPU are computed by native code.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from torch import nn

from core.errors import ModelLoadError
from core.models.config import CheckpointConfig
from core.models.hf.mla import expansions
from core.models.quantized.fp8 import keep_fp8, why_no_fp8
from core.models.quantized.grouped import keep_grouped
from core.models.quantized.registry import INSTALL, PLAIN, QuantizedWeights, method_name
from core.models.quantized.rounding import GROUP, round_to_groups

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

ROUTERS = ("gate", "router")
"""Names of what chooses among the experts beside it."""


def quantize_at_load(model: PreTrainedModel, name: str) -> QuantizedWeights:
    """Quantise the linear layers of `model` in place as `name` (of `AT_LOAD`) says; "none" leaves all as it is.

    `refuse_at_load` comes first.
    """
    return PLAIN if name == "none" else AT_LOAD[name](model)


def refuse_at_load(checkpoint: CheckpointConfig, name: str, *, encoder_decoder: bool) -> None:
    """Raise ModelLoadError if the checkpoint cannot be quantised as `name`. Reads no weights."""
    if name == "none":
        return
    if encoder_decoder:
        raise ModelLoadError(
            f"quantization {name!r} is not supported for encoder-decoders ({checkpoint.model_type!r}); leave it out"
        )
    if checkpoint.quantization is not None:
        raise ModelLoadError(
            f"quantization {name!r} is for plain weights; these are quantised with "
            f"{method_name(checkpoint.quantization)!r} already, so leave the setting out"
        )
    if name == "int8" and find_spec("torchao") is None:
        raise ModelLoadError(f"quantization {name!r} needs the package torchao: {INSTALL}")


def _left_whole(model: PreTrainedModel) -> set[nn.Module]:
    modules: list[Any] = list(model.modules())
    steps = {module.dt_proj for module in modules if hasattr(module, "dt_proj") and hasattr(module, "x_proj")}
    choosing = [getattr(module, name, None) for module in modules if hasattr(module, "experts") for name in ROUTERS]
    routers = {part for each in choosing if isinstance(each, nn.Module) for part in each.modules()}
    return expansions(model) | steps | routers


def _int8(model: PreTrainedModel) -> QuantizedWeights:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    from core.models.quantized.torchao import TORCHAO

    whole = _left_whole(model)
    quantize_(model, Int8WeightOnlyConfig(), lambda module, _: isinstance(module, nn.Linear) and module not in whole)
    return TORCHAO.adopt(model, "compressed")


def _int4(model: PreTrainedModel) -> QuantizedWeights:
    whole = _left_whole(model)
    for name, module in model.named_modules():
        if type(module) is not nn.Linear or module in whole:
            continue
        if module.in_features % 2:
            logger.info("%s is left as it is: it has an odd number of inputs", name)
            continue
        keep_grouped(module, round_to_groups(module.weight))
    return QuantizedWeights(f"int4, groups of {GROUP}")


def _fp8(model: PreTrainedModel) -> QuantizedWeights:
    if (reason := why_no_fp8(model.device, model.dtype)) is not None:
        raise ModelLoadError(f"quantization 'fp8' is not possible: {reason}")
    if model.device.type == "cpu":
        logger.warning("quantization 'fp8' is for GPUs: a CPU computes the same numbers, slower than plain weights")
    keep_fp8(model, _left_whole(model))
    return QuantizedWeights("fp8 (e4m3), scales by output and token", rounds_activations=True)


AT_LOAD: Mapping[str, Callable[[PreTrainedModel], QuantizedWeights]] = {"int8": _int8, "int4": _int4, "fp8": _fp8}
"""How weights are quantised, by the name in the configuration."""
