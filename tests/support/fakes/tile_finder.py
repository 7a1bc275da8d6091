"""A kernel that asks which tiles the programs of a launch over shared places have, interpreted or on a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from core.attention.base import MOST_CHUNKS
from core.attention.triton.extend import find_tile


@triton.jit
def _find(starts, found, segments, PACK: tl.constexpr, LINES: tl.constexpr, SEARCHED: tl.constexpr) -> None:
    place = tl.program_id(0)
    segment, tile = find_tile(starts, segments, place, PACK, LINES, SEARCHED)
    tl.store(found + 2 * place, segment)
    tl.store(found + 2 * place + 1, tile)


def tiles_of_places(starts: torch.Tensor, places: int, pack: int, lines: int) -> list[tuple[int, int]]:
    """(segment, which of its tiles of `lines` lines) for each of so many programs; `starts`: int64[segments + 1]."""
    found = torch.zeros(places, 2, dtype=torch.int32, device=starts.device)
    _find[(places,)](starts, found, len(starts) - 1, pack, lines, MOST_CHUNKS)
    return [(segment, tile) for segment, tile in found.tolist()]
