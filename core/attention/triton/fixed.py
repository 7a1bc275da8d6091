"""Attention whose sums come in one order: what a query gets depends on its keys and their places, and on nothing else.

One kernel for all tokens, chunks of prompts and rows that decode alike, with one size of tile. Keys come in parts that
begin at places of their own, whatever row, chunk or window is asked for, and so do the blocks of a part; what parts
leave is joined one part behind the other. So it does not matter whether one program takes all parts of a tile, or each
has a program of its own ("flash decoding") and another kernel joins them: both do the same operations in the same
order. Which way a launch goes may therefore depend on how many rows there are. That parts of a fixed size make splits
harmless is from He et al., "Defeating Nondeterminism in LLM Inference" (2025).
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl

from core.attention.base import MOST_CHUNKS
from core.attention.triton.codes import codes_of
from core.attention.triton.extend import find_tile
from core.attention.triton.reads import find_slots, key_blocks, read_block, read_queries
from core.attention.triton.softmax import first_key, scaled, softmax_step, sunk
from core.attention.triton.splits import Segments, Splits, leave_sums

WARPS: Final = 8
"""A program holds two tiles of sums, of all parts so far and of its newest: they would fill the registers of four."""


class FixedTile(NamedTuple):
    """How one launch is cut: the five arguments of `fixed_attention` before `shared`. Only `parts` may differ between
    two launches of one layer."""

    pack: int
    """Query heads per program: all those of a KV head."""
    block_m: int
    """Lines of a tile: a line is one query of one head."""
    block_n: int
    """Keys read at a time."""
    part: int
    """Keys of a part, a multiple of `block_n`."""
    parts: int
    """Programs that share the keys of a tile, one part each; 1: one takes them all."""


@triton.jit
def joined(peak, total, acc, other_peak, other_total, other_acc) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Peak, total [M] and acc [M, V] of what was summed and of the part behind it; one that saw no key adds nothing.

    By `fma`, so that no compiler chooses between two products which it rounds.
    """
    top = tl.maximum(peak, other_peak)
    base = tl.where(top == float("-inf"), 0.0, top)
    kept, added = tl.exp(peak - base), tl.exp(other_peak - base)
    total = tl.fma(total, kept, other_total * added)
    # Products get the shape of what they are added to beforehand: `fma` knows no other.
    kept, added = tl.broadcast_to(kept[:, None], acc.shape), other_acc * added[:, None]
    return top, total, tl.fma(acc, kept, added)


# fmt: off
# Neither another number of parts nor segments that lie elsewhere in memory are worth another compilation.
@triton.jit(
    do_not_specialize=["segments", "parts"],
    do_not_specialize_on_alignment=["rows", "lens", "starts", "prefixes"],
)
def _fixed_tile(
    q, keys, values, k_scales, v_scales, table, page_map, rows, lens, starts, prefixes, sinks, out, part,
    peaks, totals, segments, parts, scale, softcap, width, q_head, q_token, k_slot, k_head, v_slot, v_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr, PART: tl.constexpr,
    SPLIT: tl.constexpr, PAGE: tl.constexpr, RENAMED: tl.constexpr, CAPPED: tl.constexpr, SUNK: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, SEARCHED: tl.constexpr, CODES: tl.constexpr,
) -> None:
    # fmt: on
    """Program (tile of a segment's lines and part of its keys, segment, KV head)."""
    tile, split = tl.program_id(0) // parts, tl.program_id(0) % parts
    segment, kv_head = tl.program_id(1), tl.program_id(2)
    if SEARCHED:  # The tile is one of all segments.
        segment, tile = find_tile(starts, segments, tile, GROUP, BLOCK_M, SEARCHED)
    row, start = tl.load(rows + segment), tl.load(starts + segment)
    length, prefix = tl.load(lens + segment).to(tl.int32), tl.load(prefixes + segment).to(tl.int32)
    oldest = prefix + tile * BLOCK_M // GROUP
    if oldest >= length:
        return
    lines = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    offsets, heads = lines // GROUP, kv_head * GROUP + lines % GROUP
    positions, columns = prefix + offsets, tl.arange(0, BLOCK_V)
    real = positions < length
    # 64 bits for what is multiplied by strides; `start` has them.
    asked = q + heads.to(tl.int64)[:, None] * q_head + (start + offsets)[:, None] * q_token
    queries, others = read_queries(asked, real, K_DIM, BLOCK_K, BLOCK_R)
    firsts = first_key(positions, WINDOW, CHUNK)
    low = first_key(oldest, WINDOW, CHUNK)
    high = tl.minimum(prefix + (tile * BLOCK_M + BLOCK_M - 1) // GROUP + 1, length)
    begin, end = low // PART, tl.cdiv(high, PART)
    if SPLIT:
        begin, end = tl.maximum(begin, split), tl.minimum(end, split + 1)
    peak, total = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for each in range(begin, end):
        own_peak, own_total = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
        own = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
        # A window may begin within a block. Its older keys, whose slots may be anybody's by now, are not read.
        first = tl.maximum(low, each * PART) // BLOCK_N * BLOCK_N
        for at in range(first, tl.minimum(high, each * PART + PART), BLOCK_N):
            places = at + tl.arange(0, BLOCK_N)
            there = (places >= low) & (places < high)
            slots = find_slots(table, page_map, row, places, there, width, PAGE, RENAMED)
            seen = there[None, :] & (places[None, :] <= positions[:, None]) & (places[None, :] >= firsts[:, None])
            products, v, by = read_block(
                queries, others, keys, values, k_scales, v_scales, slots, kv_head, there, columns, k_slot, k_head,
                v_slot, v_head, HEADS // GROUP, K_DIM, V_DIM, BLOCK_K, BLOCK_R, CODES,
            )  # fmt: skip
            scores = tl.where(seen, scaled(products, scale, softcap, CAPPED), float("-inf"))
            own_peak, own_total, own = softmax_step(scores, v, by, own_peak, own_total, own, CODES > 0)
        peak, total, acc = joined(peak, total, acc, own_peak, own_total, own)
    line = (start + offsets) * HEADS + heads
    if SPLIT:
        leave_sums(part, peaks, totals, line * parts + split, real, columns, peak, total, acc, V_DIM)
    else:
        if SUNK:
            acc, total = sunk(acc, peak, total, tl.load(sinks + heads).to(tl.float32))
        # Queries beyond the segment's end may have seen nothing.
        found = (acc / tl.where(real, total, 1.0)[:, None]).to(out.dtype.element_ty)
        tl.store(out + line[:, None] * V_DIM + columns[None, :], found, mask=real[:, None] & (columns < V_DIM)[None, :])


# fmt: off
@triton.jit(do_not_specialize=["longest", "parts"], do_not_specialize_on_alignment=["starts", "prefixes", "lens"])
def _join_parts(
    part, peaks, totals, sinks, out, starts, prefixes, lens, longest, parts,
    HEADS: tl.constexpr, V_DIM: tl.constexpr, BLOCK_V: tl.constexpr, SUNK: tl.constexpr,
) -> None:
    # fmt: on
    """Program (place of a segment, query head): what its parts left, as one program for all of them has it."""
    segment, offset = tl.program_id(0) // longest, tl.program_id(0) % longest
    if offset >= tl.load(lens + segment) - tl.load(prefixes + segment):
        return
    line = (tl.load(starts + segment) + offset) * HEADS + tl.program_id(1)
    columns, alone = tl.arange(0, BLOCK_V), tl.arange(0, 1)
    peak, total = tl.full([1], float("-inf"), tl.float32), tl.zeros([1], tl.float32)
    acc = tl.zeros([1, BLOCK_V], tl.float32)
    for each in range(parts):
        place = line * parts + each + alone
        own_peak = tl.load(peaks + place)
        there = own_peak > float("-inf")
        own_total = tl.load(totals + place, mask=there, other=0.0)
        wanted = there[:, None] & (columns < V_DIM)[None, :]
        own = tl.load(part + place[:, None] * V_DIM + columns[None, :], mask=wanted, other=0.0)
        peak, total, acc = joined(peak, total, acc, own_peak, own_total, own)
    if SUNK:
        acc, total = sunk(acc, peak, total, tl.load(sinks + tl.program_id(1) + alone).to(tl.float32))
    found = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + line * V_DIM + columns[None, :], found, mask=(columns < V_DIM)[None, :])


@torch.library.custom_op("slipstream::fixed_attention", mutates_args=("out",))
def fixed_attention(
    out: torch.Tensor,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    page_map: torch.Tensor | None,
    rows: torch.Tensor,
    lens: torch.Tensor,
    starts: torch.Tensor,
    prefixes: torch.Tensor,
    longest: int,
    sinks: torch.Tensor | None,
    scale: float,
    softcap: float,
    window: int,
    chunk: int,
    page: int,
    pack: int,
    block_m: int,
    block_n: int,
    part: int,
    parts: int,
    shared: bool = False,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
) -> None:
    """As `core.attention.triton.extend.paged_extend`, also for rows that decode: segments of one query each.

    The five before `shared` are a `FixedTile`. Segments that are `shared` have one part.
    """
    heads, tokens, k_dim = q.shape
    v_dim = values.shape[2]
    assert pack * keys.shape[1] == heads and part % block_n == 0 and not (shared and parts > 1), (pack, part, parts)
    block_v, (block_k, block_r) = max(16, triton.next_power_of_2(v_dim)), key_blocks(k_dim)
    coded = (keys, values) if k_scales is None else (k_scales, v_scales)
    left = Splits.empty(tokens, heads, parts, v_dim, q.device) if parts > 1 else None
    tiles, segments = triton.cdiv(longest * pack, block_m), len(rows)
    assert not shared or (segments <= MOST_CHUNKS and len(starts) == segments + 1), (segments, len(starts))
    # A segment that begins within a tile begins another one.
    grid = (tiles + segments - 1, 1) if shared else (tiles, segments)
    # fmt: off
    _fixed_tile[(grid[0] * parts, grid[1], heads // pack)](
        q, keys, values, *coded, table, table if page_map is None else page_map, rows, lens, starts, prefixes,
        out if sinks is None else sinks, out, *(left or (out, out, out)), segments, parts, scale, softcap,
        table.stride(0), q.stride(0), q.stride(1), keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
        HEADS=heads, GROUP=pack, K_DIM=k_dim, V_DIM=v_dim, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
        BLOCK_R=block_r, BLOCK_V=block_v, PART=part, SPLIT=parts > 1, PAGE=page, RENAMED=page_map is not None,
        CAPPED=softcap > 0, SUNK=sinks is not None, WINDOW=window, CHUNK=chunk,
        SEARCHED=MOST_CHUNKS if shared else 0, CODES=codes_of(keys), num_warps=WARPS,
    )
    # fmt: on
    if left is not None:
        where = Segments(starts, prefixes, lens, longest)
        # fmt: off
        _join_parts[(segments * longest, heads)](
            *left, left.peaks if sinks is None else sinks, out, *where, parts,
            HEADS=heads, V_DIM=v_dim, BLOCK_V=block_v, SUNK=sinks is not None,
        )
        # fmt: on
