"""One query per row over its paged keys, split over programs: "flash decoding" (Dao et al. 2023) with table lookups.

The query heads of one KV head are the M dimension of its tile, so keys are read once for all of them. How many splits
there are follows from shapes alone, so that a launch can be captured; which keys a split gets follows from the row's
length on the device, and a split without keys ends at once. Where few heads share a program, the last of a row's
splits to be done merges them all, so that it is one launch; that is as in stream-K (Osama et al. 2023).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from core.attention.triton.codes import codes_of
from core.attention.triton.reads import find_slots, key_blocks, read_block, read_queries
from core.attention.triton.softmax import first_key, scaled, softmax_step, sunk
from core.attention.triton.splits import TOGETHER, Splits, filled_of, leave_sums, merge, merged_line, share_of


@triton.jit
def _write_alone(
    out, place, real, columns, peak, total, acc, sinks, heads, V_DIM: tl.constexpr, SUNK: tl.constexpr
) -> None:
    """Write the `real` lines of the only split of a row to their places in `out`, int64 [M]."""
    if SUNK:
        acc, total = sunk(acc, peak, total, tl.load(sinks + heads, mask=real, other=0.0).to(tl.float32))
    written = real[:, None] & (columns < V_DIM)[None, :]
    found = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + place[:, None] * V_DIM + columns[None, :], found, mask=written)


# fmt: off
@triton.jit
def _leave(
    counter, part, peaks, totals, out, place, real, columns, peak, total, acc, split, splits, filled, sinks, heads,
    head, line, count, V_DIM: tl.constexpr, SUNK: tl.constexpr, JOINED: tl.constexpr, SOME: tl.constexpr,
) -> None:
    # fmt: on
    """Leave the sums of a split for a merge by another launch, unless they are JOINED in this one.

    Then the only split with keys writes what they come to. Others are counted, and the last of the `filled` ones merges
    them all, into `count` lines of `out` from `line` on, of `head` and those behind it.
    """
    if JOINED and filled <= 1:
        _write_alone(out, place, real, columns, peak, total, acc, sinks, heads, V_DIM, SUNK)
    else:
        leave_sums(part, peaks, totals, place * splits + split, real, columns, peak, total, acc, V_DIM)
        if JOINED:
            # What all threads wrote comes before the arrival, and what others wrote before theirs is seen behind it.
            tl.debug_barrier()
            if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == filled - 1:
                tl.store(counter, 0)
                for each in range(count):
                    at, sink = line + each, 0.0
                    if SUNK:
                        sink = tl.load(sinks + head + each).to(tl.float32)
                    merged = merged_line(part, peaks, totals, at * splits, filled, sink, columns, V_DIM, SUNK, SOME)
                    tl.store(out + at * V_DIM + columns, merged.to(out.dtype.element_ty), mask=columns < V_DIM)


@triton.jit
def _biases_at(biases, distances, heads, counts, HEADS: tl.constexpr, FARTHEST: tl.constexpr) -> tl.tensor:
    """float32[h, n]: what a `RelativeBias` adds to scores of `heads` int64[h] at `distances` int32[n]; 0 where no score
    `counts`.
    """
    apart = tl.minimum(distances, FARTHEST)
    return tl.load(biases + apart[None, :] * HEADS + heads[:, None], mask=counts, other=0.0)


# Steps of other numbers of rows have other splits, and rows that begin elsewhere: not worth another compilation.
# fmt: off
@triton.jit(do_not_specialize=["splits"], do_not_specialize_on_alignment=["rows", "lens"])
def _decode_split(
    q, keys, values, k_scales, v_scales, table, page_map, rows, lens, sinks, biases, out, arrived, part, peaks,
    totals, splits, scale, softcap, width, q_head, q_token, k_slot, k_head, v_slot, v_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr,
    SPLIT_LEAST: tl.constexpr, PAGE: tl.constexpr, RENAMED: tl.constexpr, CAPPED: tl.constexpr, WINDOW: tl.constexpr,
    CHUNK: tl.constexpr, SUNK: tl.constexpr, JOINED: tl.constexpr, SOME: tl.constexpr, FARTHEST: tl.constexpr,
    CODES: tl.constexpr,
) -> None:
    # fmt: on
    """Program (row, KV head and block of its query heads, split): unnormalised sums over the split's keys, or what
    they come to, where there is one split of them, or all are JOINED by the last to arrive."""
    # 64 bits for what is multiplied by strides.
    batch = tl.program_id(0).to(tl.int64)
    block, split = tl.program_id(1), tl.program_id(2)
    blocks: tl.constexpr = (GROUP + BLOCK_H - 1) // BLOCK_H
    kv_head = block // blocks
    behind = block % blocks * BLOCK_H
    inside = behind + tl.arange(0, BLOCK_H)
    heads = (kv_head * GROUP + inside).to(tl.int64)
    real = inside < GROUP
    columns = tl.arange(0, BLOCK_V)

    row, length = tl.load(rows + batch), tl.load(lens + batch).to(tl.int32)
    oldest = first_key(length - 1, WINDOW, CHUNK)
    low, high = share_of(oldest, length, split, splits, SPLIT_LEAST)
    filled = filled_of(oldest, length, splits, SPLIT_LEAST)
    if JOINED:  # noqa: SIM102 - what is constant is decided when the kernel is compiled
        if split >= tl.maximum(filled, 1):
            return

    asked = q + heads[:, None] * q_head + batch * q_token
    queries, others = read_queries(asked, real, K_DIM, BLOCK_K, BLOCK_R)
    peak, total = tl.full([BLOCK_H], float("-inf"), tl.float32), tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_V], tl.float32)
    for start in range(low, high, BLOCK_N):
        places = start + tl.arange(0, BLOCK_N)
        seen = places < high
        slots = find_slots(table, page_map, row, places, seen, width, PAGE, RENAMED)
        products, v, by = read_block(
            queries, others, keys, values, k_scales, v_scales, slots, kv_head, seen, columns, k_slot, k_head, v_slot,
            v_head, HEADS // GROUP, K_DIM, V_DIM, BLOCK_K, BLOCK_R, CODES,
        )  # fmt: skip
        scores = scaled(products, scale, softcap, CAPPED)
        if FARTHEST:
            scores += _biases_at(biases, length - 1 - places, heads, real[:, None] & seen[None, :], HEADS, FARTHEST)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        peak, total, acc = softmax_step(scores, v, by, peak, total, acc, CODES > 0)

    place = batch * HEADS + heads
    counter, head = arrived + batch * tl.num_programs(1) + block, kv_head * GROUP + behind
    # fmt: off
    _leave(
        counter, part, peaks, totals, out, place, real, columns, peak, total, acc, split, splits, filled, sinks, heads,
        head, batch * HEADS + head, tl.minimum(GROUP - behind, BLOCK_H), V_DIM, SUNK, JOINED, SOME,
    )
    # fmt: on


@torch.library.custom_op("slipstream::paged_decode", mutates_args=("out", "arrived"))
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
    arrived: torch.Tensor | None,
    bias: torch.Tensor | None = None,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
) -> None:
    """out [B, H, Dv], contiguous, from q [H, B, D] with its last dimension dense.

    keys, values: the pool's [slots, Hkv, D or Dv]; table: int32[R, width]; page_map: int32[pages] or None; rows, lens:
    int64[B]; sinks: [H] or None. softcap, window, chunk: 0 for none. The five before `arrived` are a `DecodeTile`.
    bias: the table of a `RelativeBias`, or None. k_scales, v_scales: uint8[slots, Hkv], contiguous, where keys and
    values are codes of `core.memory.kv_e4m3`; else None. An operator, not a plain launch, so that whatever watches the
    dispatcher (PyTorch's stream sanitizer, recorded graphs) sees what it reads and writes.

    arrived: int32, zeros, one for each row and query head at least: it is one launch then, and leaves zeros behind, for
    the next one in the same stream. Without it the splits are merged by a second launch.
    """
    heads, batch, k_dim = q.shape
    kv_heads, v_dim = values.shape[1:]
    group = heads // kv_heads
    block_k, block_r = key_blocks(k_dim)
    scaled = (keys, values) if k_scales is None else (k_scales, v_scales)
    parts = Splits.empty(batch, heads, splits, v_dim, q.device)
    # fmt: off
    _decode_split[(batch, kv_heads * triton.cdiv(group, block_h), splits)](
        q, keys, values, *scaled, table, table if page_map is None else page_map, rows, lens,
        out if sinks is None else sinks, keys if bias is None else bias, out, rows if arrived is None else arrived,
        *parts, splits, scale, softcap, table.stride(0), q.stride(0), q.stride(1), keys.stride(0), keys.stride(1),
        values.stride(0), values.stride(1),
        HEADS=heads, GROUP=group, K_DIM=k_dim, V_DIM=v_dim, BLOCK_H=block_h, BLOCK_N=block_n,
        BLOCK_K=block_k, BLOCK_R=block_r, BLOCK_V=max(16, triton.next_power_of_2(v_dim)), SPLIT_LEAST=split_least,
        PAGE=page, RENAMED=page_map is not None, CAPPED=softcap > 0, WINDOW=window, CHUNK=chunk,
        SUNK=sinks is not None, JOINED=arrived is not None, SOME=TOGETHER // max(16, triton.next_power_of_2(v_dim)),
        FARTHEST=0 if bias is None else len(bias) - 1, CODES=codes_of(keys), num_warps=warps,
    )
    # fmt: on
    if arrived is None:
        merge(parts, sinks, out)
