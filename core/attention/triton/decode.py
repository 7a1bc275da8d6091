"""One query per row over its paged keys, split over programs: "flash decoding" (Dao et al. 2023) with table lookups.

The query heads of one KV head are the M dimension of its tile, so keys are read once for all of them. How many splits
there are follows from shapes alone, so that a launch can be captured; which keys a split gets follows from the row's
length on the device, and a split without keys ends at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from core.attention.triton.reads import find_slots, key_blocks, read_columns, read_lines
from core.attention.triton.softmax import first_key, product, scaled, softmax_step
from core.attention.triton.splits import Splits, leave_sums, merge, share_of


# Steps of other numbers of rows have other splits, and rows that begin elsewhere: not worth another compilation.
# fmt: off
@triton.jit(do_not_specialize=["splits"], do_not_specialize_on_alignment=["rows", "lens"])
def _decode_split(
    q, keys, values, table, page_map, rows, lens, part, peaks, totals, splits, scale, softcap, width, q_head, q_token,
    k_slot, k_head, v_slot, v_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr,
    SPLIT_LEAST: tl.constexpr, PAGE: tl.constexpr, RENAMED: tl.constexpr, CAPPED: tl.constexpr, WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    # fmt: on
    """Program (row, KV head and block of its query heads, split): unnormalised sums over the split's keys."""
    # 64 bits for what is multiplied by strides.
    batch = tl.program_id(0).to(tl.int64)
    block, split = tl.program_id(1), tl.program_id(2)
    blocks: tl.constexpr = (GROUP + BLOCK_H - 1) // BLOCK_H
    kv_head = block // blocks
    inside = block % blocks * BLOCK_H + tl.arange(0, BLOCK_H)
    heads = (kv_head * GROUP + inside).to(tl.int64)
    real = inside < GROUP
    dims, columns = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)

    row = tl.load(rows + batch)
    length = tl.load(lens + batch).to(tl.int32)
    low, high = share_of(first_key(length - 1, WINDOW, CHUNK), length, split, splits, SPLIT_LEAST)

    asked = q + heads[:, None] * q_head + batch * q_token
    queries = read_lines(asked, real, dims, K_DIM)
    if BLOCK_R:
        rest = BLOCK_K + tl.arange(0, BLOCK_R)
        others = read_lines(asked, real, rest, K_DIM)
    peak = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_V], tl.float32)
    for start in range(low, high, BLOCK_N):
        places = start + tl.arange(0, BLOCK_N)
        seen = places < high
        slots = find_slots(table, page_map, row, places, seen, width, PAGE, RENAMED)
        at = keys + slots[None, :] * k_slot + kv_head * k_head
        v = read_lines(values + slots[:, None] * v_slot + kv_head * v_head, seen, columns, V_DIM)
        products = product(queries, read_columns(at, seen, dims, K_DIM))
        if BLOCK_R:
            products += product(others, read_columns(at, seen, rest, K_DIM))
        scores = scaled(products, scale, softcap, CAPPED)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        peak, total, acc = softmax_step(scores, v, peak, total, acc)

    leave_sums(part, peaks, totals, (batch * HEADS + heads) * splits + split, real, columns, peak, total, acc, V_DIM)


@torch.library.custom_op("slipstream::paged_decode", mutates_args=("out",))
def paged_decode(
    out: torch.Tensor,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    page_map: torch.Tensor | None,
    rows: torch.Tensor,
    lens: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float,
    softcap: float,
    window: int,
    chunk: int,
    page: int,
    block_h: int,
    block_n: int,
    warps: int,
    splits: int,
    split_least: int,
) -> None:
    """out [B, H, Dv], contiguous, from q [H, B, D] with its last dimension dense.

    keys, values: the pool's [slots, Hkv, D or Dv]; table: int32[R, width]; page_map: int32[pages] or None; rows, lens:
    int64[B]; sinks: [H] or None. softcap, window, chunk: 0 for none. The last five are a `DecodeTile`. An operator, not
    a plain launch, so that whatever watches the dispatcher (PyTorch's stream sanitizer, recorded graphs) sees what it
    reads and writes.
    """
    heads, batch, k_dim = q.shape
    kv_heads, v_dim = values.shape[1:]
    group = heads // kv_heads
    block_k, block_r = key_blocks(k_dim)
    parts = Splits.empty(batch, heads, splits, v_dim, q.device)
    # fmt: off
    _decode_split[(batch, kv_heads * triton.cdiv(group, block_h), splits)](
        q, keys, values, table, table if page_map is None else page_map, rows, lens, *parts, splits, scale,
        softcap, table.stride(0), q.stride(0), q.stride(1), keys.stride(0), keys.stride(1), values.stride(0),
        values.stride(1),
        HEADS=heads, GROUP=group, K_DIM=k_dim, V_DIM=v_dim, BLOCK_H=block_h, BLOCK_N=block_n,
        BLOCK_K=block_k, BLOCK_R=block_r, BLOCK_V=max(16, triton.next_power_of_2(v_dim)), SPLIT_LEAST=split_least,
        PAGE=page, RENAMED=page_map is not None, CAPPED=softcap > 0, WINDOW=window, CHUNK=chunk, num_warps=warps,
    )
    # fmt: on
    merge(parts, sinks, out)
