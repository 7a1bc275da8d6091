"""Keys of a row shared out to several programs, "flash decoding" (Dao et al. 2023): what each leaves, and their merge.

A split leaves unnormalised sums under a peak of its own. Where it saw no key the peak is -inf, and its sums, which
need not be written, are not read.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

MIN_SPLIT = 128
"""Keys per split at least: fewer do not pay for another program and its share of the merge."""


class Segments(NamedTuple):
    """Which tokens there are, where they come in segments of at most `longest` places: int64[n] on the device."""

    starts: torch.Tensor
    """The place of each segment's first token."""
    prefixes: torch.Tensor
    """Tokens of its row before that."""
    lens: torch.Tensor
    """Tokens of its row behind its last one."""
    longest: int


class Splits(NamedTuple):
    """What the splits of every (token, query head) leave, float32."""

    sums: torch.Tensor
    """[T, H, splits, Dv]: values by their weights, not divided yet."""
    peaks: torch.Tensor
    """[T, H, splits]: the greatest score."""
    totals: torch.Tensor
    """[T, H, splits]: the sum of the weights."""

    @classmethod
    def empty(cls, tokens: int, heads: int, splits: int, v_dim: int, device: torch.device) -> Splits:
        """Memory for them, with anything in it."""
        sums = torch.empty(tokens, heads, splits, v_dim, dtype=torch.float32, device=device)
        peaks = torch.empty(tokens, heads, splits, dtype=torch.float32, device=device)
        return cls(sums, peaks, torch.empty_like(peaks))


@triton.jit
def share_of(low, high, split, splits, LEAST: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Where the keys of `split` begin and end, among those from `low` to `high`; beyond the last there are none."""
    share = tl.maximum(tl.cdiv(high - low, splits), LEAST)
    low += split * share
    return low, tl.minimum(low + share, high)


@triton.jit
def leave_sums(part, peaks, totals, place, real, columns, peak, total, acc, V_DIM: tl.constexpr) -> None:
    """Write peak, total [M] and acc [M, V] of the `real` lines to their places, int64 [M], in `Splits`."""
    tl.store(peaks + place, peak, mask=real)
    tl.store(totals + place, total, mask=real)
    summed = real & (peak > float("-inf"))
    places = part + place[:, None] * V_DIM + columns[None, :]
    tl.store(places, acc, mask=summed[:, None] & (columns < V_DIM)[None, :])


@triton.jit
def filled_of(low, high, splits, LEAST: tl.constexpr) -> tl.tensor:
    """How many splits have keys, of those that `share_of` shares them out to: the first ones."""
    return tl.cdiv(high - low, tl.maximum(tl.cdiv(high - low, splits), LEAST))


COMPARED = tl.constexpr(128)
"""Peaks compared at a time: one of each thread."""
MERGED = tl.constexpr(8)
"""Splits merged at a time: their sums, [8, Dv], stay in registers however many splits there are."""
TOGETHER = 8192
"""Sums that one program merges at a time for all heads of its own, one head after the other."""


@triton.jit
def merged_line(
    part, peaks, totals, begin, count, sink, columns, V_DIM: tl.constexpr, SUNK: tl.constexpr, SOME: tl.constexpr
) -> tl.tensor:
    """float32 [BLOCK_V]: `count` splits' sums from place `begin` on, SOME at a time, under one peak and denominator.

    Read past the first cache: they may have been written while this kernel ran, by another program.
    """
    highest = tl.full([COMPARED], float("-inf"), tl.float32)
    for first in range(0, count, COMPARED):
        some = first + tl.arange(0, COMPARED)
        height = tl.load(peaks + begin + some, mask=some < count, other=float("-inf"), cache_modifier=".cg")
        highest = tl.maximum(highest, height)
    top = tl.max(highest, 0)
    denominator = 0.0
    if SUNK:
        top = tl.maximum(top, sink)
        denominator = tl.exp(sink - top)
    merged = tl.zeros_like(columns).to(tl.float32)
    for first in range(0, count, SOME):
        some = first + tl.arange(0, SOME)
        height = tl.load(peaks + begin + some, mask=some < count, other=float("-inf"), cache_modifier=".cg")
        total = tl.load(totals + begin + some, mask=some < count, other=0.0, cache_modifier=".cg")
        denominator += tl.sum(tl.exp(height - top) * total, 0)
        summed = height > float("-inf")
        sums = tl.load(
            part + (begin + some)[:, None] * V_DIM + columns[None, :],
            mask=summed[:, None] & (columns < V_DIM)[None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        merged += tl.sum(tl.exp(height - top)[:, None] * sums, 0)
    return merged / denominator


# fmt: off
@triton.jit(
    do_not_specialize=["splits", "longest"], do_not_specialize_on_alignment=["starts", "prefixes", "lens"]
)
def _merge_splits(
    part, peaks, totals, sinks, out, starts, prefixes, lens, longest, splits,
    HEADS: tl.constexpr, V_DIM: tl.constexpr, BLOCK_V: tl.constexpr, SUNK: tl.constexpr, RAGGED: tl.constexpr,
) -> None:
    # fmt: on
    """Program (token, query head): the splits' sums under one peak, divided by one denominator, sink included."""
    token = tl.program_id(0).to(tl.int64)
    if RAGGED:
        segment, offset = tl.program_id(0) // longest, tl.program_id(0) % longest
        if offset >= tl.load(lens + segment) - tl.load(prefixes + segment):
            return
        token = tl.load(starts + segment) + offset
    place = token * HEADS + tl.program_id(1)
    columns = tl.arange(0, BLOCK_V)
    sink = 0.0
    if SUNK:
        sink = tl.load(sinks + tl.program_id(1)).to(tl.float32)
    merged = merged_line(part, peaks, totals, place * splits, splits, sink, columns, V_DIM, SUNK, MERGED)
    tl.store(out + place * V_DIM + columns, merged.to(out.dtype.element_ty), mask=columns < V_DIM)


def merge(splits: Splits, sinks: torch.Tensor | None, out: torch.Tensor, segments: Segments | None = None) -> None:
    """out [T, H, Dv], contiguous, from what all splits left of each token; sinks: [H] or None.

    With `segments` the tokens are those of theirs, and no other place of `out` is written. How many splits there are is
    an argument of the kernel and no part of it: steps of any number of rows share what is compiled.
    """
    tokens, heads, count, v_dim = splits.sums.shape
    where = (splits.peaks, splits.peaks, splits.peaks, 1) if segments is None else segments
    programs = tokens if segments is None else len(segments.lens) * segments.longest
    # fmt: off
    _merge_splits[(programs, heads)](
        *splits, splits.peaks if sinks is None else sinks, out, *where, count,
        HEADS=heads, V_DIM=v_dim, BLOCK_V=max(16, triton.next_power_of_2(v_dim)),
        SUNK=sinks is not None, RAGGED=segments is not None,
    )
    # fmt: on
