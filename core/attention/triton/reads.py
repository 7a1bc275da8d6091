"""What the attention kernels read: queries, and the keys and values of a row, wherever its pages lie."""

from __future__ import annotations

import triton
import triton.language as tl


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
