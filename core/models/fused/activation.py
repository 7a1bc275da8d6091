"""The gate of a gated feed-forward layer in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def _silu_mul(gate, up, out, size, BLOCK: tl.constexpr) -> None:
    """Program: BLOCK elements."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < size
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
    _silu_mul[(triton.cdiv(gates.numel(), BLOCK),)](gates, ups, out, gates.numel(), BLOCK=BLOCK)
    return out
