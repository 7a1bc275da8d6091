"""Sizes of the attention kernels' tiles, and how many programs share a row's keys.

All of it follows from what the host knows before a step, shapes and the longest segment. Lengths of rows it leaves to
the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton

from core.attention.triton.codes import ARITHMETIC
from core.attention.triton.splits import MIN_SPLIT

PROGRAMS_PER_SM = 4
"""Programs per multiprocessor that kernels aim at by splitting a row's keys, where rows and heads are fewer."""

NARROW = 16 * 128
"""Float32 sums of a decode tile of 16 heads over values of 128 elements. Tiles of no more get `NARROW_WARPS`,
`NARROW_PROGRAMS` for each multiprocessor and `NARROW_SPLIT` keys per split at least: measured (decision 53)."""

NARROW_WARPS, NARROW_PROGRAMS, NARROW_SPLIT = 2, 2, 64

SIZES = {256: (128, 64, 64), 512: (64, 32, 64), 1152: (32, 32, 32), 1 << 30: (16, 16, 16)}
"""Lines, keys and packed lines of a tile, for keys of at most so many bytes: what fits into registers and shared memory
of an A100, as its assembler says (`tests/unit/core/attention/test_triton_compiles.py`)."""


def rehearsed(rows: int, multiprocessors: int) -> list[list[int]]:
    """Tokens of the segments of steps that need all kernels that steps of up to `rows` segments can; see `rehearsals`.

    A tile of packed lines is as high as a power of two, so lengths that double have tiles of all heights, and one token
    more than is ever packed the tile of a single head. Keys are split where a segment is alone, and not where there are
    segments enough for the device.
    """
    most = max(packed for _, _, packed in SIZES.values())
    lengths = [*(1 << power for power in range(most.bit_length())), most + 1]
    crowd = min(rows, PROGRAMS_PER_SM * multiprocessors)
    return [[], *([length, *[1] * (count - 1)] for length in lengths for count in sorted({1, crowd}))]


def warps_of(lines: int, columns: int) -> int:
    """Warps of a program: 8 for tiles whose float32 sums, [lines, columns], would fill the registers of 4."""
    return 8 if lines > 64 or lines * columns >= 64 * 256 else 4


class DecodeTile(NamedTuple):
    """How one launch of the decode kernel is cut: the arguments of `paged_decode` behind `page`."""

    block_h: int
    """Query heads of a KV head per program."""
    block_n: int
    """Keys read at a time."""
    warps: int
    splits: int
    """Programs that share the keys of a row."""
    split_least: int
    """Keys per split at least."""

    def joins(self, v_dim: int) -> bool:
        """Whether the last of a row's splits merges them: where that is not too much for one program."""
        return self.block_h <= 16 and v_dim <= 256


class ExtendTile(NamedTuple):
    """How one launch of the extend kernel is cut: the last arguments of `paged_extend`."""

    pack: int
    """Query heads per program: 1, or all those of a KV head, whose keys are then read once for all of them."""
    block_m: int
    """Lines of a tile: a line is one query of one head."""
    block_n: int
    """Keys read at a time."""
    splits: int
    """Programs that share the keys of a tile."""
    split_least: int
    """Keys per split at least."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """Sizes of the kernels' tiles, in queries and keys. Wide keys need small ones, to fit into shared memory."""

    multiprocessors: int
    block_m: int
    block_n: int
    split_least: int
    packed: int
    """Lines of a packed tile at most, and the longest segment, in queries, for which tiles are packed."""

    @classmethod
    def of(cls, device: torch.device, k_dim: int, dtype: torch.dtype, codes: int = 0) -> Tiles:
        """For keys of `k_dim` elements. On the CPU, where kernels are interpreted, small: short rows then fill several.

        Float32 operands are multiplied from registers, of which they take twice as many as their bytes say. So do
        numbers that arithmetic makes of `codes` (`codes_of`).
        """
        if device.type == "cpu":
            return cls(6, 16, 16, 16, 16)
        count = torch.cuda.get_device_properties(device).multi_processor_count
        width = k_dim * dtype.itemsize * (2 if dtype == torch.float32 else 1)
        width *= 2 if codes == ARITHMETIC else 1
        block_m, block_n, packed = next(sizes for most, sizes in SIZES.items() if width <= most)
        return cls(count, block_m, block_n, MIN_SPLIT, packed)

    def splits(self, batch: int, kv_heads: int, width: int, programs: int, least: int) -> int:
        """Splits per row: enough `programs` for each multiprocessor, and none that could never have `least` keys.

        Computed from shapes only, never from lengths, so that a captured graph stays right.
        """
        wanted = -(-programs * self.multiprocessors // max(1, batch * kv_heads))
        return max(1, min(wanted, -(-width // least)))

    def decode(self, batch: int, heads: int, kv_heads: int, v_dim: int, width: int) -> DecodeTile:
        """The tile for one query of each of `batch` rows of at most `width` keys.

        Sums of 64 heads over values of 512 elements, those of latents, would not fit into registers.
        """
        group, columns = heads // kv_heads, triton.next_power_of_2(v_dim)
        block_h = max(16, min(64 if columns <= 256 else 32, triton.next_power_of_2(group)))
        warps, programs, least = warps_of(block_h, columns), PROGRAMS_PER_SM, self.split_least
        if block_h * columns <= NARROW:
            warps, programs, least = NARROW_WARPS, NARROW_PROGRAMS, min(NARROW_SPLIT, least)
        splits = self.splits(batch, kv_heads * triton.cdiv(group, block_h), width, programs, least)
        return DecodeTile(block_h, self.block_n, warps, splits, least)

    def extend(self, longest: int, segments: int, heads: int, kv_heads: int, width: int) -> ExtendTile:
        """The tile for segments of `longest` queries at most, over rows of at most `width` keys.

        A row that verifies drafts, or the rest of a prompt, has a few queries: a tile for one head would be nearly
        empty. So its lines are (query, head) for all heads of one KV head, as in FlashAttention's packed GQA (Dao et
        al.), and the tile is the smallest power of two that holds them. Up to `packed` queries, tiles of `packed` lines
        read each key no more often than one tile for each head would. What is packed makes so few programs that
        its keys are split as those of the decode kernel: one row of 8 KV heads would keep 8 multiprocessors busy.
        """
        if longest > self.packed:
            return ExtendTile(1, self.block_m, self.block_n, 1, self.split_least)
        group = heads // kv_heads
        lines = longest * group
        block_m = max(16, min(self.packed, triton.next_power_of_2(lines)))
        programs = segments * triton.cdiv(lines, block_m)
        splits = self.splits(programs, kv_heads, width, PROGRAMS_PER_SM, self.split_least)
        return ExtendTile(group, block_m, self.block_n, splits, self.split_least)
