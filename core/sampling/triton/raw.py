"""Log probabilities of the model itself, from its logits before anything changes them: no copy of them is kept.

Of a row remain the two numbers that make any of its logits a log probability, and its most likely tokens.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from core.sampling.triton.reads import ordered

BLOCK: Final = 2048
"""Logits that a program reads at a time."""
WARPS: Final = 8


@triton.jit
def _row_of(logits, place, vocab, start, BLOCK: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """float32 [BLOCK] logits from `start` on, -inf behind the last, and their ids int32."""
    ids = start + tl.arange(0, BLOCK)
    return tl.load(logits + place * vocab + ids, mask=ids < vocab, other=float("-inf")), ids


# fmt: off
@triton.jit(
    do_not_specialize=["width"],
    do_not_specialize_on_alignment=["wanted", "normalisers", "top_ids", "top_values"],
)
def _normalise_row(logits, wanted, normalisers, top_ids, top_values, vocab, width, BLOCK: tl.constexpr) -> None:
    # fmt: on
    """Program: place of the S that sample. A row that wants no log probability is not read."""
    place = tl.program_id(0).to(tl.int64)
    asked = tl.load(wanted + place)
    peak, total = 0.0, 0.0
    if asked >= 0:
        best = tl.full([BLOCK], float("-inf"), tl.float32)
        for start in range(0, vocab, BLOCK):
            values, _ids = _row_of(logits, place, vocab, start, BLOCK)
            best = tl.maximum(best, values)
        peak = tl.max(best, 0)
        sums = tl.zeros([BLOCK], tl.float32)
        for start in range(0, vocab, BLOCK):
            values, _ids = _row_of(logits, place, vocab, start, BLOCK)
            sums += tl.exp(values - peak)
        total = tl.log(tl.sum(sums, 0))
    tl.store(normalisers + 2 * place, peak)
    tl.store(normalisers + 2 * place + 1, total)
    # By falling logit, then rising id, as one number: each is the largest below the one before.
    last = tl.full([], 0x7FFFFFFFFFFFFFFF, tl.int64)
    for rank in range(width):
        if rank < asked:
            ranks = tl.full([BLOCK], -0x8000000000000000, tl.int64)
            for start in range(0, vocab, BLOCK):
                values, ids = _row_of(logits, place, vocab, start, BLOCK)
                number = (ordered(values).to(tl.int64) << 32) + (0x7FFFFFFF - ids)
                ranks = tl.maximum(ranks, tl.where((number < last) & (ids < vocab), number, -0x8000000000000000))
            last = tl.max(ranks, 0)
            found = 0x7FFFFFFF - (last & 0xFFFFFFFF)
            # A row of nothing but NaN has no ranks, and gives ids that mean nothing but exist.
            found = tl.maximum(tl.minimum(found, vocab - 1), 0)
            tl.store(top_ids + place * width + rank, found)
            tl.store(top_values + place * width + rank, tl.load(logits + place * vocab + found) - peak - total)
        else:
            tl.store(top_ids + place * width + rank, tl.full([], 0, tl.int64))
            tl.store(top_values + place * width + rank, 0.0)


@torch.library.custom_op("slipstream::normalise", mutates_args=("normalisers", "top_ids", "top_values"))
def normalise(
    logits: torch.Tensor,
    wanted: torch.Tensor,
    normalisers: torch.Tensor,
    top_ids: torch.Tensor,
    top_values: torch.Tensor,
) -> None:
    """What is kept of logits, contiguous float32[S, V], of which row i wants `wanted[i]` alternatives, int64[S].

    normalisers: float32[S, 2], such that `logit - first - second` is a log probability; top_ids, top_values: int64 and
    float32 [S, K], the most likely tokens, best first, lower ids first among equals, and their log probabilities, 0
    behind the last that a row wants. A row that wants -1 gets zeros.
    """
    rows, vocab = logits.shape
    _normalise_row[(rows,)](
        *(logits, wanted, normalisers, top_ids, top_values, vocab, top_ids.shape[1]), BLOCK=BLOCK, num_warps=WARPS
    )


@normalise.register_fake
def _(*_arguments: object) -> None:
    """Nothing to tell of shapes: everything that it makes was there before."""
