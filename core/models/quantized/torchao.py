"""torchao: linear layers whose weight is a tensor subclass that brings its own matrix product.

Four-bit weights in groups are taken over (`torchao_int4.py`). Of all others the subclass keeps its packed data and
computes. Which of them computes on which device the library knows best, so the plain forward of the self-check asks it.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from core.errors import ModelLoadError
from core.models.config import CheckpointConfig
from core.models.quantized.registry import QuantizedWeights, QuantMethod, Settings
from core.models.quantized.torchao_int4 import keep_int4


def _check(settings: Settings) -> None:
    """Accept any settings: they name classes of the library, which only the loaded weights show."""


def _adopt(model: PreTrainedModel, held: str) -> QuantizedWeights:
    kinds, rounds = set(), False
    for _, weight in _weights(model):
        if weight.dtype != model.dtype:
            saved, wanted = (str(each).removeprefix("torch.") for each in (weight.dtype, model.dtype))
            raise ModelLoadError(
                f"torchao weights that were quantised from {saved} are not computed in {wanted}; serve them with "
                f"dtype {saved}"
            )
        kinds.add(type(weight).__name__)
        rounds = _rounds_activations(weight) or rounds
    keep_int4(model, held)
    return QuantizedWeights(" ".join(["torchao", *sorted(kinds)]), rounds)


def _weights(model: PreTrainedModel) -> list[tuple[str, Any]]:
    plain = (torch.nn.Parameter, torch.Tensor)
    return [(name, weight) for name, weight in model.named_parameters() if type(weight) not in plain]


def _rounds_activations(weight: Any) -> bool:
    """Whether `weight` quantises the activations it multiplies. Raises ModelLoadError where that would mix tokens."""
    dynamic = getattr(weight, "act_quant_kwargs", None)
    if dynamic is None:
        # The kind for edge devices has a name instead of arguments, and scales per token only.
        return getattr(weight, "activation_quantization", None) is not None
    granularity = type(getattr(dynamic, "granularity", None)).__name__
    if granularity == "PerTensor" and getattr(weight, "act_quant_scale", None) is None:
        raise ModelLoadError(
            "activations quantised with one dynamic scale per tensor are not supported: requests that share a step "
            "would change each other's tokens; scales per row or static ones are"
        )
    return True


TORCHAO = QuantMethod(library="torchao", check=_check, adopt=_adopt, auto_dtype_is_saved=True)


def torchao(checkpoint: CheckpointConfig) -> QuantMethod:
    """The same for all checkpoints."""
    return TORCHAO
