"""Entries of `req_to_token` that the scheduler has decided on and that no batch has carried to the device yet."""

from __future__ import annotations

import numpy as np

from core.memory.req_to_token_pool import TableWrites
from core.types.arrays import Ints


class PendingWrites:
    """Collects entries a page at a time while a step is planned; the batch of that step takes them once (law 2)."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._noted: list[tuple[Ints, Ints, Ints]] = []
        self._firsts: dict[int, Ints] = {}
        """By row: its pages from the first place on, as `note_first` was told."""
        self._rows: set[int] = set()
        """Rows with an entry in `_noted`. Lets `forget` return at once, as it does for nearly every row."""

    def note(self, rows: Ints, page_places: Ints, pages: Ints) -> None:
        """The page of `rows[i]` at place `page_places[i]` is `pages[i]` from now on; int64[n] each."""
        self._noted.append((rows, page_places, pages))
        self._rows.update(rows.tolist())

    def note_first(self, row: int, pages: Ints) -> None:
        """`row` has a new owner, which begins with `pages`, int64[n]: a copy. Its former owner was forgotten."""
        if len(pages):
            self._firsts[row] = pages

    def forget(self, row: int) -> None:
        """Drop the entries of `row`, which its owner gives back.

        The next owner may note other pages for the same places within the same plan. The device applies the entries of
        one step in no order, so the old ones could win.
        """
        self._firsts.pop(row, None)
        if row not in self._rows:
            return
        self._rows.remove(row)
        kept = [(noted, noted[0] != row) for noted in self._noted]
        self._noted = [(rows[stay], places[stay], pages[stay]) for (rows, places, pages), stay in kept if stay.any()]

    def take(self) -> TableWrites:
        """The pages noted since the last call. The very next batch must carry them."""
        if not (self._noted or self._firsts):
            return TableWrites.empty(self._page_size)
        noted, self._noted = self._noted, []
        if self._firsts:
            noted.insert(0, _entries(self._firsts))
            self._firsts = {}
        self._rows.clear()
        rows, places, pages = (np.concatenate(parts) for parts in zip(*noted, strict=True))
        return TableWrites(rows, places, pages, self._page_size)


def _entries(firsts: dict[int, Ints]) -> tuple[Ints, Ints, Ints]:
    """(row, place and number of each page of `firsts`), int64[n] each."""
    rows, counts = (np.fromiter(each, np.int64, len(firsts)) for each in (firsts, map(len, firsts.values())))
    pages = np.concatenate(list(firsts.values()))
    places = np.arange(len(pages)) - (counts.cumsum() - counts).repeat(counts)
    return rows.repeat(counts), places, pages
