"""Products of a fused decoder whose sums come in one order, however many rows there are.

A library picks its kernel, and so the order of a sum, by the number of rows. This kernel has one tile for any number:
inputs are added from the first to the last, in blocks, by one program for each tile of outputs. The tile is not tuned:
no GPU was at hand when it was written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

from core.attention.triton.softmax import product
from core.models.fused.layer import Product

BLOCK_M: Final = 64
"""Rows of a tile. A few rows fill a part of it, which costs a step of decoding little: it waits for weights."""
BLOCK_N: Final = 32
"""Outputs of a tile: few, since all programs of a step of decoding come from the number of outputs alone."""
BLOCK_BYTES: Final = 128
"""Inputs of a block, in bytes of a row."""
STAGES: Final = 4


# fmt: off
@triton.jit(do_not_specialize=["rows"])
def _multiply(
    x, weight, bias, out, rows, outputs, inputs,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BIASED: tl.constexpr,
) -> None:
    # fmt: on
    """Program (tile of outputs, tile of rows): out [M, N] = x [M, K] by weight [N, K], and bias [N] if BIASED."""
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # 64 bits for what is multiplied by widths.
    read, weighed = x + row.to(tl.int64)[:, None] * inputs, weight + output.to(tl.int64)[None, :] * inputs
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, inputs, BLOCK_K):
        place = first + tl.arange(0, BLOCK_K)
        there = place < inputs
        some = tl.load(read + place[None, :], mask=(row < rows)[:, None] & there[None, :], other=0.0)
        weights = tl.load(weighed + place[:, None], mask=(output < outputs)[None, :] & there[:, None], other=0.0)
        sums += product(some, weights)
    if BIASED:
        sums += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[None, :]
    places = out + row.to(tl.int64)[:, None] * outputs + output[None, :]
    tl.store(places, sums.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (output < outputs)[None, :])


@torch.library.custom_op("slipstream::fixed_product", mutates_args=("out",))
def fixed_product(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """out [M, N] = x [M, K] by weight [N, K], and bias [N]; contiguous, all of one dtype, which is rounded to once.

    An operator, not a plain launch, so that whatever watches the dispatcher sees what it reads and writes.
    """
    (rows, inputs), outputs = x.shape, len(weight)
    assert x.is_contiguous() and weight.is_contiguous() and out.is_contiguous(), "rows lie one behind the other"
    # fmt: off
    _multiply[(triton.cdiv(outputs, BLOCK_N), triton.cdiv(rows, BLOCK_M))](
        x, weight, weight if bias is None else bias, out, rows, outputs, inputs,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_BYTES // x.dtype.itemsize, BIASED=bias is not None,
        num_warps=4, num_stages=STAGES,
    )
    # fmt: on


@dataclass(frozen=True, slots=True)
class FixedProduct(Product):
    """A `Product` that gives a row the same bits among any number of rows."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[M, N] of [M, K]."""
        out = x.new_empty(len(x), len(self.weight))
        if len(x):
            fixed_product(out, x.contiguous(), self.weight, self.bias)
        return out
