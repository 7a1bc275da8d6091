"""Prompt chunks of ragged lengths over the pages before them and their own: one tile of queries per program.

The step's keys and values are in the pool already, so a key is found through the table wherever it came from.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from core.attention.triton.softmax import find_slots, first_key, scaled_scores, softmax_step


# fmt: off
@triton.jit
def _extend_tile(
    q, keys, values, table, page_map, rows, lens, starts, prefixes, sinks, out, scale, softcap, width, q_head,
    q_token, k_slot, k_head, v_slot, v_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PAGE: tl.constexpr, RENAMED: tl.constexpr,
    CAPPED: tl.constexpr, SUNK: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
) -> None:
    # fmt: on
    """Program (tile of a segment's queries, segment, query head)."""
    tile, segment, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, start = tl.load(rows + segment), tl.load(starts + segment)
    length, prefix = tl.load(lens + segment).to(tl.int32), tl.load(prefixes + segment).to(tl.int32)
    oldest = prefix + tile * BLOCK_M
    if oldest >= length:
        return
    kv_head = head // GROUP
    offsets = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    positions = prefix + offsets
    real = positions < length
    dims, columns = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    queries = tl.load(
        q + head * q_head + (start + offsets)[:, None] * q_token + dims[None, :],
        mask=real[:, None] & (dims < K_DIM)[None, :],
        other=0.0,
    )
    firsts = first_key(positions, WINDOW, CHUNK)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    high = tl.minimum(oldest + BLOCK_M, length)
    for low in range(first_key(oldest, WINDOW, CHUNK), high, BLOCK_N):
        places = low + tl.arange(0, BLOCK_N)
        there = places < high
        slots = find_slots(table, page_map, row, places, there, width, PAGE, RENAMED)
        k = tl.load(
            keys + slots[None, :] * k_slot + kv_head * k_head + dims[:, None],
            mask=there[None, :] & (dims < K_DIM)[:, None],
            other=0.0,
        )
        v = tl.load(
            values + slots[:, None] * v_slot + kv_head * v_head + columns[None, :],
            mask=there[:, None] & (columns < V_DIM)[None, :],
            other=0.0,
        )
        seen = there[None, :] & (places[None, :] <= positions[:, None]) & (places[None, :] >= firsts[:, None])
        scores = scaled_scores(queries, k, scale, softcap, CAPPED)
        scores = tl.where(seen, scores, float("-inf"))
        peak, total, acc = softmax_step(scores, v, peak, total, acc)
    if SUNK:
        sink = tl.load(sinks + head).to(tl.float32)
        top = tl.maximum(peak, sink)
        decay = tl.exp(peak - top)
        acc, total = acc * decay[:, None], total * decay + tl.exp(sink - top)
    # Queries beyond the segment's end may have seen nothing.
    attended = (acc / tl.where(real, total, 1.0)[:, None]).to(out.dtype.element_ty)
    places = out + ((start + offsets) * HEADS + head)[:, None] * V_DIM + columns[None, :]
    tl.store(places, attended, mask=real[:, None] & (columns < V_DIM)[None, :])


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
    block_m: int,
    block_n: int,
) -> None:
    """Rows `starts[i]` … of out [T, H, Dv] and of q [H, T, D] belong to segment i of n, `longest` tokens at most.

    rows, lens, starts, prefixes: int64[n]; lens are those after the step. The rest is as in `paged_decode`.
    """
    heads, _, k_dim = q.shape
    kv_heads, v_dim = values.shape[1:]
    # fmt: off
    _extend_tile[(triton.cdiv(longest, block_m), len(rows), heads)](
        q, keys, values, table, table if page_map is None else page_map, rows, lens, starts, prefixes,
        lens if sinks is None else sinks, out, scale, softcap, table.stride(0), q.stride(0), q.stride(1),
        keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
        HEADS=heads, GROUP=heads // kv_heads, K_DIM=k_dim, V_DIM=v_dim, BLOCK_M=block_m, BLOCK_N=block_n,
        BLOCK_K=max(16, triton.next_power_of_2(k_dim)), BLOCK_V=max(16, triton.next_power_of_2(v_dim)), PAGE=page,
        RENAMED=page_map is not None, CAPPED=softcap > 0, SUNK=sinks is not None, WINDOW=window, CHUNK=chunk,
        num_warps=8 if block_m > 64 else 4,
    )
    # fmt: on
