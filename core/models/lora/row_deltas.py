"""Each row's own low-rank update in two launches, whichever adapters the rows have: for captured decode steps.

What a row needs is found on the device: the place of its adapter, and from that where the two matrices lie and how many
columns they have. So adapters come and go, and rows change, without another launch. A row without an adapter has place
0, whose rank is 0: its programs end at once. The idea is Punica's (Chen et al. 2023, "BGMV"); its kernels index one
padded stack of all adapters, these go to wherever an adapter was put.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from core.models.lora.addresses import FIELDS

BLOCK_R, BLOCK_K, BLOCK_O = 16, 256, 128
ENTRY = tl.constexpr(FIELDS)
"""Of a place: offsets of the two matrices from `origin`, in elements, and their rank."""
EVEN = tl.constexpr(16)
"""Offsets are multiples of it: a matrix is aligned to 64 bytes, and no element has more than four."""


# Rows of a step begin at odd places of what they are part of: not worth another compilation.
# fmt: off
@triton.jit(do_not_specialize=["ranks"], do_not_specialize_on_alignment=["places"])
def _shrink(
    low, x, origin, table, places, ranks, x_row, WIDTH: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
) -> None:
    # fmt: on
    """Program (row, BLOCK_R ranks): low [rows, ranks] = A x, rounded as a product of two layers is."""
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_R
    found = table + tl.load(places + row) * ENTRY
    rank = tl.load(found + 2).to(tl.int32)
    if first < rank:
        a = origin + tl.multiple_of(tl.load(found), EVEN)
        lines, columns = first + tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_K)
        real = lines < rank
        total = tl.zeros([BLOCK_R], tl.float32)
        for start in range(0, WIDTH, BLOCK_K):
            at = start + columns
            inside = at < WIDTH
            inputs = tl.load(x + row * x_row + at, mask=inside, other=0.0).to(tl.float32)
            there = a + lines[:, None] * WIDTH + at[None, :]
            weights = tl.load(there, mask=real[:, None] & inside[None, :], other=0.0)
            total += tl.sum(weights.to(tl.float32) * inputs[None, :], 1)
        tl.store(low + row * ranks + lines, total.to(low.dtype.element_ty), mask=real)


# Rows of a step begin at odd places of what they are part of: not worth another compilation.
# fmt: off
@triton.jit(do_not_specialize=["ranks"], do_not_specialize_on_alignment=["places"])
def _expand(
    y, low, origin, table, places, ranks, y_row, WIDTH: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_O: tl.constexpr,
) -> None:
    # fmt: on
    """Program (row, BLOCK_O outputs): y += B low, where B low is rounded before it is added."""
    row = tl.program_id(0).to(tl.int64)
    found = table + tl.load(places + row) * ENTRY
    rank = tl.load(found + 2).to(tl.int32)
    if rank > 0:
        b = origin + tl.multiple_of(tl.load(found + 1), EVEN)
        outputs, lines = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O), tl.arange(0, BLOCK_R)
        inside = outputs < WIDTH
        total = tl.zeros([BLOCK_O], tl.float32)
        for start in range(0, rank, BLOCK_R):
            at = start + lines
            real = at < rank
            inputs = tl.load(low + row * ranks + at, mask=real, other=0.0).to(tl.float32)
            there = b + outputs[:, None] * rank + at[None, :]
            weights = tl.load(there, mask=inside[:, None] & real[None, :], other=0.0)
            total += tl.sum(weights.to(tl.float32) * inputs[None, :], 1)
        end = y + row * y_row + outputs
        before = tl.load(end, mask=inside, other=0.0).to(tl.float32)
        delta = total.to(y.dtype.element_ty).to(tl.float32)
        tl.store(end, (before + delta).to(y.dtype.element_ty), mask=inside)


@torch.library.custom_op("slipstream::add_row_deltas", mutates_args=("y",))
def add_row_deltas(
    y: torch.Tensor, x: torch.Tensor, origin: torch.Tensor, table: torch.Tensor, places: torch.Tensor, ranks: int
) -> None:
    """Add to each row of y [n, out] the update that its place stands for, of the same row of x [n, in].

    y, x, origin: one dtype, last dimension dense; table: int64[P, ENTRY], dense; places: int64[n], each below P; ranks:
    no rank in the table is higher. The matrices are A [rank, in] and B [out, rank], dense, with the scaling in B.
    """
    assert y.dtype == x.dtype == origin.dtype and y.stride(-1) == x.stride(-1) == 1, (y.dtype, x.dtype, origin.dtype)
    count, outputs = y.shape
    low = torch.empty(count, ranks, dtype=x.dtype, device=x.device)
    # fmt: off
    _shrink[(count, triton.cdiv(ranks, BLOCK_R))](
        low, x, origin, table, places, ranks, x.stride(0), WIDTH=x.shape[1], BLOCK_R=BLOCK_R, BLOCK_K=BLOCK_K,
    )
    _expand[(count, triton.cdiv(outputs, BLOCK_O))](
        y, low, origin, table, places, ranks, y.stride(0), WIDTH=outputs, BLOCK_R=BLOCK_R, BLOCK_O=BLOCK_O,
    )
    # fmt: on
