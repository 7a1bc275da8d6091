"""Segments of ragged lengths over the pages before them and their own: chunks of prompts, rows that verify drafts.

The step's keys and values are in the pool already, so a key is found through the table wherever it came from. A
program has a tile of lines, and a line is one query of one head: of a single head where segments are long, of all heads
of a KV head where they are short (`Tiles.extend`). Keys of short ones may be split over programs, as in `paged_decode`.

Where the host knows no lengths, in a captured step, segments share a number of places: there are programs enough for
any division of them, and each finds its tile among the segments' starts. That no list of tiles is needed for it, since
a segment's first tile follows from its start and its number, is from vLLM's unified attention kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from core.attention.base import MOST_CHUNKS
from core.attention.triton.codes import codes_of
from core.attention.triton.reads import find_slots, key_blocks, read_block, read_queries
from core.attention.triton.softmax import first_key, scaled, softmax_step, sunk
from core.attention.triton.splits import Segments, Splits, leave_sums, merge, share_of
from core.attention.triton.tiles import warps_of


@triton.jit
def find_tile(
    starts, segments, place, PACK: tl.constexpr, BLOCK_M: tl.constexpr, SEARCHED: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """(segment, and which of its tiles) of the tile at `place` among those of all `segments`, as int32.

    Segment i begins at tile start_i * PACK // BLOCK_M + i. That is at or behind the end of the one before, and leaves
    at most one tile between them, which finds itself behind the end of its segment. A thread looks at each start.
    """
    some = tl.arange(0, SEARCHED)
    begun = tl.load(starts + some, mask=some < segments, other=0)
    first = (begun * PACK // BLOCK_M).to(tl.int32) + some
    segment = tl.sum(((first <= place) & (some < segments)).to(tl.int32), 0) - 1
    begins = (tl.load(starts + segment) * PACK // BLOCK_M).to(tl.int32) + segment
    return segment, place - begins


# Neither another number of splits nor segments that lie elsewhere in memory are worth another compilation.
# fmt: off
@triton.jit(
    do_not_specialize=["segments", "splits"],
    do_not_specialize_on_alignment=["rows", "lens", "starts", "prefixes"],
)
def _extend_tile(
    q, keys, values, k_scales, v_scales, table, page_map, rows, lens, starts, prefixes, sinks, out, part,
    peaks, totals, segments, splits, scale, softcap, width, q_head, q_token, k_slot, k_head, v_slot, v_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, PACK: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr,
    SPLIT: tl.constexpr, SPLIT_LEAST: tl.constexpr, PAGE: tl.constexpr, RENAMED: tl.constexpr, CAPPED: tl.constexpr,
    SUNK: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, SEARCHED: tl.constexpr,
    CODES: tl.constexpr,
) -> None:
    # fmt: on
    """Program (tile of a segment's lines and split of its keys, segment, block of PACK query heads of one KV head)."""
    tile, split = tl.program_id(0) // splits, tl.program_id(0) % splits
    segment, block, kv_head = tl.program_id(1), tl.program_id(2), tl.program_id(2) * PACK // GROUP
    if SEARCHED:  # The tile is one of all segments.
        segment, tile = find_tile(starts, segments, tile, PACK, BLOCK_M, SEARCHED)
    row, start = tl.load(rows + segment), tl.load(starts + segment)
    length, prefix = tl.load(lens + segment).to(tl.int32), tl.load(prefixes + segment).to(tl.int32)
    oldest = prefix + tile * BLOCK_M // PACK
    if oldest >= length:
        return
    lines = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    offsets, heads = lines // PACK, block * PACK + lines % PACK
    positions = prefix + offsets
    real = positions < length
    columns = tl.arange(0, BLOCK_V)
    # 64 bits for what is multiplied by strides; `start` has them.
    asked = q + heads.to(tl.int64)[:, None] * q_head + (start + offsets)[:, None] * q_token
    queries, others = read_queries(asked, real, K_DIM, BLOCK_K, BLOCK_R)
    firsts = first_key(positions, WINDOW, CHUNK)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    low = first_key(oldest, WINDOW, CHUNK)
    high = tl.minimum(prefix + (tile * BLOCK_M + BLOCK_M - 1) // PACK + 1, length)
    if SPLIT:
        low, high = share_of(low, high, split, splits, SPLIT_LEAST)
    for first in range(low, high, BLOCK_N):
        places = first + tl.arange(0, BLOCK_N)
        there = places < high
        slots = find_slots(table, page_map, row, places, there, width, PAGE, RENAMED)
        seen = there[None, :] & (places[None, :] <= positions[:, None]) & (places[None, :] >= firsts[:, None])
        products, v, by = read_block(
            queries, others, keys, values, k_scales, v_scales, slots, kv_head, there, columns, k_slot, k_head, v_slot,
            v_head, HEADS // GROUP, K_DIM, V_DIM, BLOCK_K, BLOCK_R, CODES,
        )  # fmt: skip
        scores = scaled(products, scale, softcap, CAPPED)
        scores = tl.where(seen, scores, float("-inf"))
        peak, total, acc = softmax_step(scores, v, by, peak, total, acc, CODES > 0)
    line = (start + offsets) * HEADS + heads
    if SPLIT:
        leave_sums(part, peaks, totals, line * splits + split, real, columns, peak, total, acc, V_DIM)
    else:
        if SUNK:
            acc, total = sunk(acc, peak, total, tl.load(sinks + heads).to(tl.float32))
        # Queries beyond the segment's end may have seen nothing.
        acc = (acc / tl.where(real, total, 1.0)[:, None]).to(out.dtype.element_ty)
        tl.store(out + line[:, None] * V_DIM + columns[None, :], acc, mask=real[:, None] & (columns < V_DIM)[None, :])


@torch.library.custom_op("slipstream::paged_extend", mutates_args=("out",))
def paged_extend(
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
    splits: int,
    split_least: int,
    shared: bool = False,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
) -> None:
    """Rows `starts[i]` … of out [T, H, Dv] and of q [H, T, D] belong to segment i of n, `longest` tokens at most.

    rows, lens, starts, prefixes: int64[n]; lens are those after the step, and places of `out` behind them stay as they
    were. The five before `shared` are an `ExtendTile`; the rest is as in `paged_decode`. What is launched follows from
    shapes and numbers: lengths and prefixes are read on the device alone.

    `shared`: `longest` places are for all n <= MOST_CHUNKS segments together, which lie one behind the other from
    place 0 on. `starts` is int64[n + 1] then, and ends with where the last one ends; a segment may have no token.
    """
    heads, tokens, k_dim = q.shape
    kv_heads, v_dim = values.shape[1:]
    block_v, (block_k, block_r) = max(16, triton.next_power_of_2(v_dim)), key_blocks(k_dim)
    scaled = (keys, values) if k_scales is None else (k_scales, v_scales)
    parts = Splits.empty(tokens, heads, splits, v_dim, q.device) if splits > 1 else None
    tiles, segments = triton.cdiv(longest * pack, block_m), len(rows)
    assert not shared or (segments <= MOST_CHUNKS and len(starts) == segments + 1), (segments, len(starts))
    # A segment that begins within a tile begins another one.
    grid = (tiles + segments - 1, 1) if shared else (tiles, segments)
    # fmt: off
    _extend_tile[(grid[0] * splits, grid[1], heads // pack)](
        q, keys, values, *scaled, table, table if page_map is None else page_map, rows, lens, starts, prefixes,
        out if sinks is None else sinks, out, *(parts or (out, out, out)), segments, splits, scale, softcap,
        table.stride(0), q.stride(0), q.stride(1), keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
        HEADS=heads, GROUP=heads // kv_heads, PACK=pack, K_DIM=k_dim, V_DIM=v_dim, BLOCK_M=block_m, BLOCK_N=block_n,
        BLOCK_K=block_k, BLOCK_R=block_r, BLOCK_V=block_v, SPLIT=splits > 1, SPLIT_LEAST=split_least, PAGE=page,
        RENAMED=page_map is not None, CAPPED=softcap > 0, SUNK=sinks is not None, WINDOW=window, CHUNK=chunk,
        SEARCHED=MOST_CHUNKS if shared else 0, CODES=codes_of(keys), num_warps=warps_of(block_m, block_v),
    )
    # fmt: on
    if parts is not None:
        # Together they are one segment from place 0, where the first begins, to where the last ends.
        merged = Segments(starts[:1], starts[:1], starts[segments:], longest) if shared else None
        merge(parts, sinks, out, merged or Segments(starts, prefixes, lens, longest))
