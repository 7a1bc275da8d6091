"""RMS normalisation in one pass over each row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _rms_norm(x, weight, out, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """Program: one row."""
    row = tl.program_id(0).to(tl.int64) * WIDTH
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    values = tl.load(x + row + columns, mask=inside, other=0.0).to(tl.float32)
    scaled = values * tl.rsqrt(tl.sum(values * values, 0) / WIDTH + eps)
    # Rounded before the weight is applied, as the module does.
    rounded = scaled.to(out.dtype.element_ty).to(tl.float32)
    weights = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + columns, (weights * rounded).to(out.dtype.element_ty), mask=inside)


@torch.library.custom_op("slipstream::rms_norm", mutates_args=())
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """weight · x / rms(x) over the last dimension, in x's shape and dtype; the root mean square in float32."""
    rows = x.contiguous()
    out = torch.empty_like(rows)
    width = rows.shape[-1]
    _rms_norm[(rows.numel() // width,)](
        rows, weight, out, eps, WIDTH=width, BLOCK=triton.next_power_of_2(width), num_warps=8 if width > 2048 else 4
    )
    return out
