"""Entries of the table that a batch takes along: of rows with a new owner, and of rows that grow."""

from __future__ import annotations

import numpy as np

from core.memory.pending_writes import PendingWrites

PAGE = 4


def entries(writes: PendingWrites) -> list[tuple[int, int, int]]:
    """(row, place, page) of each."""
    taken = writes.take()
    assert taken.page_size == PAGE
    return list(zip(taken.rows.tolist(), taken.places.tolist(), taken.pages.tolist(), strict=True))


def test_pages_are_entered_once() -> None:
    writes = PendingWrites(PAGE)
    writes.note(np.array([3, 1]), np.array([4, 0]), np.array([7, 8]))
    writes.note_first(2, np.array([5, 6, 9]))
    writes.note_first(4, np.array([1]))
    writes.note_first(5, np.empty(0, np.int64))
    first = [(2, 0, 5), (2, 1, 6), (2, 2, 9), (4, 0, 1)]
    assert entries(writes) == [*first, (3, 4, 7), (1, 0, 8)]
    assert entries(writes) == []
    writes.note_first(2, np.array([3]))
    assert entries(writes) == [(2, 0, 3)]


def test_a_row_that_is_given_back_leaves_no_entries() -> None:
    """Its next owner may have other pages within the same plan, and entries of a batch are made in no order."""
    writes = PendingWrites(PAGE)
    writes.note_first(2, np.array([5, 6]))
    writes.note_first(1, np.array([7]))
    writes.note(np.array([2, 1]), np.array([2, 1]), np.array([8, 9]))
    writes.forget(2)
    writes.note_first(2, np.array([4]))
    assert sorted(entries(writes)) == [(1, 0, 7), (1, 1, 9), (2, 0, 4)]
    writes.note_first(2, np.array([5]))
    writes.forget(2)
    assert entries(writes) == []
