"""Tokens of a row are computed with the adapter of the row's owner of the moment, and with no other."""

from __future__ import annotations

import numpy as np

from core.engine.adapters.rows import AdapterRows
from core.memory.companion import AdmissionFacts
from core.models.lora.slots import LoraWrites
from core.types.arrays import Ints
from tests.unit.core.engine.test_adapter_table import adapter, table

NO_PAGES: Ints = np.empty(0, np.int64)


def planned(rows: AdapterRows, *step: tuple[int, int]) -> LoraWrites | None:
    """Of a step with so many tokens of each row."""
    owners, lens = np.array(step, np.int64).reshape(-1, 2).T
    return rows.planned(owners, np.zeros_like(lens), lens, NO_PAGES)


def grouped(writes: LoraWrites | None) -> dict[int, list[int]]:
    assert writes is not None
    return {slot: places.tolist() for slot, places in writes.groups}


def test_tokens_are_grouped_by_the_slot_that_a_row_was_admitted_with() -> None:
    rows = AdapterRows(table(), 4)
    for row, slot in ((1, 7), (2, 0), (3, 9)):
        rows.admitted(row, AdmissionFacts(4, NO_PAGES, 0, adapter_slot=slot))
    writes = planned(rows, (3, 1), (2, 2), (1, 3))
    assert grouped(writes) == {7: [3, 4, 5], 9: [0]}
    assert writes is not None and writes.num_tokens == 6


def test_the_next_owner_of_a_row_has_its_own_adapter_or_none() -> None:
    rows = AdapterRows(table(), 2)
    rows.admitted(1, AdmissionFacts(4, NO_PAGES, 0, adapter_slot=7))
    rows.released(1)
    assert planned(rows, (1, 2)) is None
    rows.admitted(1, AdmissionFacts(4, NO_PAGES, 0, adapter_slot=8))
    assert grouped(planned(rows, (1, 2))) == {8: [0, 1]}


def test_a_change_of_the_books_travels_once_though_no_row_has_an_adapter() -> None:
    books = table()
    rows = AdapterRows(books, 2)
    books.load("french", adapter(), pinned=False)
    writes = planned(rows, (1, 2))
    assert writes is not None and len(writes.slots) == 1 and not writes.groups
    assert planned(rows, (1, 2)) is None


def test_a_step_brings_the_slot_of_each_row() -> None:
    """In the order of the batch, beside the places of a step without drafts; it is not what the rows change later."""
    rows = AdapterRows(table(), 4)
    for row, slot in ((1, 7), (2, 0), (3, 9)):
        rows.admitted(row, AdmissionFacts(4, NO_PAGES, 0, adapter_slot=slot))
    owners, lens, ahead = np.array([3, 2, 1]), np.ones(3, np.int64), np.array([2, 0, 4])
    writes = rows.planned(owners, np.array([8, 9, 7]), lens, NO_PAGES, ahead)
    rows.released(3)
    assert writes is not None and writes.row_slots.tolist() == [9, 0, 7]
    assert grouped(writes) == {7: [2], 9: [0]} and writes.num_tokens == 3
