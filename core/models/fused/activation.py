"""The gate of a gated feed-forward layer in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def _silu_mul(gate, up, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """Program (row, BLOCK of its elements). How many rows there are is no part of what is compiled."""
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    places, inside = tl.program_id(0).to(tl.int64) * WIDTH + columns, columns < WIDTH
    gates = tl.load(gate + places, mask=inside, other=0.0).to(tl.float32)
    # Rounded before the product, as the module does.
    opened = (gates * tl.sigmoid(gates)).to(out.dtype.element_ty).to(tl.float32)
    ups = tl.load(up + places, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + places, (opened * ups).to(out.dtype.element_ty), mask=inside)


@torch.library.custom_op("slipstream::silu_mul", mutates_args=())
def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up, element by element, in their shape and dtype."""
    gates, ups = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gates)
    width = gates.shape[-1]
    _silu_mul[(gates.numel() // width, triton.cdiv(width, BLOCK))](gates, ups, out, WIDTH=width, BLOCK=BLOCK)
    return out
