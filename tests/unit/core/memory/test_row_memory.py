"""Memory of a model that keeps nothing of its tokens: requests hold rows."""

from __future__ import annotations

import numpy as np
import pytest

from core.invariants import InvariantViolation
from core.memory.kv_allocator import PagedKVAllocator
from core.memory.row_memory import RowMemory
from core.memory.rows import RowAllocator
from core.prefix.registry import build_prefix_cache

PAGE = 4
NONE = np.empty(0, np.int64)


def make(rows: int = 3, pages: int = 2) -> RowMemory:
    return RowMemory(RowAllocator(rows), PagedKVAllocator(pages, PAGE), build_prefix_cache("none", PAGE), 64)


def test_requests_hold_rows_and_no_pages() -> None:
    """Three texts of 40 tokens beside two pages of four."""
    memory, ids = make(), np.arange(40)
    assert memory.fits_alone(40)
    seats = [memory.admit(ids, "", 0) for _ in range(3)]
    assert [seat and seat.cached_tokens for seat in seats] == [0, 0, 0]
    assert len({seat.row for seat in seats if seat}) == 3 and memory.allocator.held == 0
    assert [(each.name, each.used) for each in memory.stats()] == [("req", 3), ("kv_page", 0)]
    assert memory.admit(ids, "", 0) is None and memory.rows.used == 3
    assert memory.would_admit(ids, "", 0, NONE) is None
    first, *_ = seats
    assert first is not None and memory.would_admit(ids, "", 0, np.array([first.row])) == 0
    assert not memory.takes(first.row) and len(memory.take_writes().rows) == 0
    memory.vouch(first.row, 40)
    memory.release(first.row, first.generation, ids)
    memory.check_integrity()
    assert memory.would_admit(ids, "", 0, NONE) == 0 and memory.rows.used == 2
    with pytest.raises(InvariantViolation, match="row_double_free"):
        memory.release(first.row, first.generation, ids)
    again = memory.admit(ids, "", 0)
    assert again is not None and (again.row, again.generation) == (first.row, first.generation + 1)
    assert (
        memory.pages_found(np.array([again.row])).tolist() == memory.pages_taken(np.array([again.row])).tolist() == [0]
    )
    doubt = memory.doubt(again.row, ids, 0)
    assert doubt.node is None and doubt.readers == ()
