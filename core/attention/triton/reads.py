"""What the attention kernels read: queries, and the keys and values of a row, wherever its pages lie."""

from __future__ import annotations

import triton
import triton.language as tl

from core.attention.triton.e4m3 import numbers_of, read_scales
from core.attention.triton.softmax import product


def key_blocks(dim: int) -> tuple[int, int]:
    """Elements of queries and keys that are multiplied at a time, powers of two, and of the rest behind them, or 0.

    The latents of DeepSeek-V3 have 576: as 1024 they would take twice the shared memory and twice the products.
    """
    whole = triton.next_power_of_2(dim)
    rest = max(16, triton.next_power_of_2(dim - whole // 2))
    return (whole // 2, rest) if whole > dim and whole // 2 >= 16 and rest < whole // 2 else (max(16, whole), 0)


@triton.jit
def find_slots(table, page_map, row, places, wanted, width, PAGE: tl.constexpr, RENAMED: tl.constexpr) -> tl.tensor:
    """int64 [N]: pool slots of the keys at `places` of table row `row`; slot 0 where not `wanted`."""
    # Divided while they have 32 bits.
    slots = tl.load(table + row * width + places, mask=wanted, other=0)
    if RENAMED:
        pages = tl.load(page_map + slots // PAGE, mask=wanted, other=0)
        slots = pages * PAGE + slots % PAGE
    return slots.to(tl.int64)


@triton.jit
def read_lines(base, there, elements, DIM: tl.constexpr) -> tl.tensor:
    """[N, E]: `elements` of what begins at `base` [N, 1]; 0 for lines that are not `there` [N], and behind DIM."""
    return tl.load(base + elements[None, :], mask=there[:, None] & (elements < DIM)[None, :], other=0.0)


@triton.jit
def read_columns(base, there, elements, DIM: tl.constexpr) -> tl.tensor:
    """[E, N]: the same, with a line for each of the `elements`; `base` is [1, N]."""
    return tl.load(base + elements[:, None], mask=there[None, :] & (elements < DIM)[:, None], other=0.0)


@triton.jit
def read_queries(
    asked, real, K_DIM: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Both parts of `key_blocks` of what begins at `asked` [M, 1]; where there is one, it is both."""
    queries = read_lines(asked, real, tl.arange(0, BLOCK_K), K_DIM)
    others = queries
    if BLOCK_R:
        others = read_lines(asked, real, BLOCK_K + tl.arange(0, BLOCK_R), K_DIM)
    return queries, others


# fmt: off
@triton.jit
def read_block(
    queries, others, keys, values, k_scales, v_scales, slots, head, there, columns, k_slot, k_head, v_slot, v_head,
    KV_HEADS: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
    CODES: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    # fmt: on
    """Of keys and values of KV head `head` at `slots` [N]: products with queries, float32 [M, N], the values [N, V],
    and what these are yet to be multiplied by, float32 [N], where they are codes (`numbers_of`).
    """
    kind: tl.constexpr = queries.dtype
    at = keys + slots[None, :] * k_slot + head * k_head
    v = read_lines(values + slots[:, None] * v_slot + head * v_head, there, columns, V_DIM)
    v = numbers_of(v, kind, CODES)
    products = product(queries, numbers_of(read_columns(at, there, tl.arange(0, BLOCK_K), K_DIM), kind, CODES))
    if BLOCK_R:
        rest = BLOCK_K + tl.arange(0, BLOCK_R)
        products += product(others, numbers_of(read_columns(at, there, rest, K_DIM), kind, CODES))
    by = tl.full([1], 1.0, tl.float32)
    if CODES:
        products *= read_scales(k_scales, slots, head, there, KV_HEADS)[None, :]
        by = read_scales(v_scales, slots, head, there, KV_HEADS)
    return products, v, by
