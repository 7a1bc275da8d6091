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
        self._rows: set[int] = set()
        """Rows with an entry in `_noted`. Lets `forget` return at once, as it does for nearly every row."""

    def note(self, rows: Ints, page_places: Ints, pages: Ints) -> None:
        """The page of `rows[i]` at place `page_places[i]` is `pages[i]` from now on; int64[n] each."""
        self._noted.append((rows, page_places, pages))
        self._rows.update(rows.tolist())

    def forget(self, row: int) -> None:
        """Drop the entries of `row`, which its owner gives back.

        The next owner may note other pages for the same places within the same plan. The device applies the entries of
        one step in no order, so the old ones could win.
        """
        if row not in self._rows:
            return
        self._rows.remove(row)
        kept = [(noted, noted[0] != row) for noted in self._noted]
        self._noted = [(rows[stay], places[stay], pages[stay]) for (rows, places, pages), stay in kept if stay.any()]

    def take(self) -> TableWrites:
        """The pages noted since the last call, in order. The very next batch must carry them."""
        if not self._noted:
            return TableWrites.empty(self._page_size)
        noted, self._noted = self._noted, []
        self._rows.clear()
        rows, places, pages = (np.concatenate(parts) for parts in zip(*noted, strict=True))
        return TableWrites(rows, places, pages, self._page_size)
