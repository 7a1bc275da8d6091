"""Another pool that follows rows and pages: asked before anything changes, told of everything that ends."""

from __future__ import annotations

from typing import Any

import numpy as np

from core.memory.companion import AdmissionFacts
from core.memory.kv_allocator import PagedKVAllocator
from core.memory.request_memory import RequestMemory
from core.memory.rows import RowAllocator
from core.prefix.registry import build_prefix_cache
from core.types.arrays import Ints
from core.types.stats import PoolStats

PAGE = 4


class Marks:
    """One mark per row, and one for every second page of a prompt that was computed; `room` of them in all."""

    name = "mark"

    def __init__(self, room: int) -> None:
        self.room = room
        self.rows: set[int] = set()
        self.pages: set[int] = set()

    def resumable(self, pages: Ints) -> int:
        marked = [place + 1 for place, page in enumerate(pages.tolist()) if page in self.pages]
        return max(marked, default=0)

    def fits_alone(self, total_tokens: int, encoder_tokens: int) -> bool:
        return total_tokens <= 40

    def can_admit(self, facts: AdmissionFacts) -> bool:
        return len(self.rows) < self.room

    def would_admit(self, facts: AdmissionFacts, leaving: Ints) -> bool:
        return len(self.rows) - len(leaving) < self.room

    def admitted(self, row: int, facts: AdmissionFacts) -> None:
        assert row not in self.rows and len(facts.cached) == self.resumable(facts.cached) <= facts.known
        self.rows.add(row)

    def planned(self, rows: Ints, prefix_lens: Ints, extend_lens: Ints, pages: Ints, ahead: Ints | None = None) -> Any:
        computed = [row[: end // PAGE] for row, end in zip(pages, prefix_lens + extend_lens, strict=True)]
        self.pages.update(int(page) for row in computed for page in row[1::2])
        return list(map(len, computed))

    def released(self, row: int) -> None:
        self.rows.remove(row)

    def replaced(self, pages: Ints, originals: Ints) -> None:
        moved = dict(zip(pages.tolist(), originals.tolist(), strict=True))
        self.pages |= {moved[page] for page in self.pages if page in moved}

    def freed(self, pages: Ints) -> None:
        self.pages -= set(pages.tolist())

    def stats(self) -> tuple[PoolStats, ...]:
        return (PoolStats(self.name, self.room, len(self.rows)),)

    def check_integrity(self) -> None:
        assert len(self.rows) <= self.room


def make(marks: Marks, pages: int = 12) -> RequestMemory:
    cache = build_prefix_cache("radix", PAGE)
    return RequestMemory(RowAllocator(4), PagedKVAllocator(pages, PAGE), cache, 64, [marks])


def ids(count: int, start: int = 0) -> Ints:
    return np.arange(start, start + count, dtype=np.int64)


def compute(memory: RequestMemory, row: int, start: int, count: int) -> Any:
    return memory.plan_companions(np.array([row]), np.array([start]), np.array([count]))["mark"]


def test_a_refusal_changes_nothing() -> None:
    memory = make(Marks(room=1))
    first = memory.admit(ids(8), "", 0)
    assert first is not None and memory.admit(ids(8, 50), "", 0) is None
    assert (memory.rows.used, memory.allocator.held) == (1, 2)
    memory.release(first.row, first.generation, ids(0))
    assert memory.admit(ids(8, 50), "", 0) is not None
    memory.check_integrity()


def test_a_prefix_is_worth_what_every_pool_kept_of_it() -> None:
    memory = make(marks := Marks(room=4))
    first = memory.admit(ids(13), "", 0)
    assert first is not None and compute(memory, first.row, 0, 13) == [3]
    memory.release(first.row, first.generation, ids(13))
    assert len(marks.pages) == 1, "pages 2 of 3 carry a mark"
    second = memory.admit(ids(20), "", 0)
    assert second is not None and second.cached_tokens == 8, "three pages are cached, the mark stands behind two"
    memory.check_integrity()


def test_what_was_kept_for_a_page_goes_with_it() -> None:
    memory = make(marks := Marks(room=4), pages=4)
    first = memory.admit(ids(16), "", 0)
    assert first is not None
    compute(memory, first.row, 0, 16)
    memory.release(first.row, first.generation, ids(16))
    assert marks.pages and memory.admit(ids(16, 100), "", 0) is not None
    assert not marks.pages, "evicted pages kept their marks, and a new owner would be taken for the old one"


def test_the_entry_check_asks_too_and_occupancy_shows() -> None:
    memory = make(Marks(room=2))
    assert memory.fits_alone(40) and not memory.fits_alone(41)
    assert [pool.name for pool in memory.stats()] == ["req", "kv_page", "mark"]
