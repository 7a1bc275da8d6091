"""Weights rounded to eight-bit floats (e4m3), a scale per output, times activations rounded alike, a scale per token.

The products are `torch._scaled_mm`'s on a GPU of compute capability 8.9 or newer, whose matrix units take such numbers
twice as fast as bfloat16. A CPU multiplies the same numbers as float32, so that what a GPU computes can be checked
anywhere. A token's scale is its own, so that requests in one step do not change each other's tokens. Scales by output
and token are what vLLM and SGLang use for weights that are quantised at load.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any, Final

import torch
from torch import nn

from core.errors import ModelLoadError

logger = logging.getLogger(__name__)

FP8: Final = torch.float8_e4m3fn
LARGEST: Final = 448.0
"""The largest number of this type."""
SMALLEST_SCALE: Final = 1e-12
"""For rows of nothing but zeros, and those so small that a quotient by their scale would not be finite."""
MULTIPLE: Final = 16
"""Inputs and outputs of a layer must be multiples of it, for the matrix units."""
CAPABILITY: Final = (8, 9)
WEIGHT, SCALE = "weight_fp8", "weight_scale"
"""Names of the buffers of a layer that keeps its weight so: e4m3 [N, K] and float32[N, 1]."""


def why_no_fp8(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why products of eight-bit floats are not computed on `device` for activations of `dtype`; None if they are."""
    if device.type != "cuda":
        return None
    found = torch.cuda.get_device_capability(device)
    if found < CAPABILITY:
        return f"it needs a GPU of compute capability 8.9 or newer, and this one has {found[0]}.{found[1]}; take int8"
    if dtype is not torch.bfloat16:
        return f"on a GPU it needs dtype bfloat16, not {str(dtype).removeprefix('torch.')}"
    return None


@torch.inference_mode()
def keep_fp8(model: nn.Module, whole: Collection[nn.Module]) -> None:
    """Have the linear layers of `model`, but those among `whole`, keep weights in eight bits and compute with them.

    A layer whose sizes the matrix units do not take is left as it is, and named in the log. Raises ModelLoadError for a
    weight that is not finite.
    """
    for name, module in model.named_modules():
        if type(module) is not nn.Linear or module in whole:
            continue
        if module.in_features % MULTIPLE or module.out_features % MULTIPLE:
            logger.info("%s is left as it is: its sizes are no multiples of %d", name, MULTIPLE)
            continue
        values, scale = round_rows(module.weight)
        if not bool(scale.isfinite().all()):
            raise ModelLoadError(f"{name} has weights that are not finite, which cannot be quantised")
        # A mixer may ask a layer for the type that it multiplies.
        module.weight = nn.Parameter(torch.empty(0, dtype=module.weight.dtype, device=values.device), False)
        module.register_buffer(WEIGHT, values)
        module.register_buffer(SCALE, scale)
        module.forward = Fp8Forward(module)  # type: ignore[method-assign]


class Fp8Forward:
    """Replaces `forward` of a linear layer, whose buffers move and are freed with it."""

    def __init__(self, linear: nn.Linear) -> None:
        self._linear: Any = linear

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """[..., N] from [..., K], in the input's dtype."""
        linear = self._linear
        rows = input.reshape(-1, input.shape[-1])
        return multiply(rows, linear.weight_fp8, linear.weight_scale, linear.bias).view(*input.shape[:-1], -1)


def multiply(input: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """[T, N] in the dtype of `input` [T, K], which is rounded for it; weight: e4m3 [N, K], scale: float32[N, 1]."""
    values, by_token = _rounded(input)
    if input.device.type == "cuda":
        by_output = scale.view(1, -1)
        return torch._scaled_mm(
            values, weight.t(), scale_a=by_token, scale_b=by_output, bias=bias, out_dtype=input.dtype
        )
    product = (values.float() @ weight.float().t()).mul_(by_token).mul_(scale.view(1, -1)).to(input.dtype)
    return product if bias is None else product + bias


def round_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(e4m3 [T, K], float32[T, 1]): numbers whose products with their row's scale are nearest to `rows`, floats.

    A row's largest number is the type's largest.
    """
    wide = rows.float()
    scale = wide.abs().amax(-1, keepdim=True).div_(LARGEST).clamp_(min=SMALLEST_SCALE)
    # Quotients may be above by a last bit, which would be no number.
    return (wide / scale).clamp_(-LARGEST, LARGEST).to(FP8), scale


def _rounded(input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`round_rows`, in one launch on a GPU."""
    if input.device.type != "cuda":
        return round_rows(input)
    from core.models.fused.fp8_rows import round_rows_at_once

    found: tuple[torch.Tensor, torch.Tensor] = round_rows_at_once(input, LARGEST, SMALLEST_SCALE)
    return found
