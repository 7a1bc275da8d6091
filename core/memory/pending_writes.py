"""Entries of `req_to_token` that the scheduler has decided on and no batch has carried yet."""

from __future__ import annotations

import numpy as np

from core.memory.req_to_token_pool import TableWrites
from core.types.arrays import Ints


class PendingWrites:
    """Noted a page at a time while a step is planned, taken once by the batch of that step (law 2)."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._noted: list[tuple[Ints, Ints, Ints]] = []
        self._rows: set[int] = set()
        """Those of which something is noted: few rows change hands twice in a plan, and prompts have many pages."""

    def note(self, rows: Ints, page_places: Ints, pages: Ints) -> None:
        """Page `page_places[i]` of `rows[i]`, all int64[n], is `pages[i]` from now on."""
        self._noted.append((rows, page_places, pages))
        self._rows.update(rows.tolist())

    def forget(self, row: int) -> None:
        """Drop the entries of `row`, which changes hands.

        Its next owner may note the same ones for the same step, and the device applies those of one step in no order.
        """
        if row not in self._rows:
            return
        self._rows.remove(row)
        kept = [(noted, noted[0] != row) for noted in self._noted]
        self._noted = [(rows[stay], places[stay], pages[stay]) for (rows, places, pages), stay in kept if stay.any()]

    def take(self) -> TableWrites:
        """Entries noted since the last call, token by token and in order; they belong into the very next batch."""
        if not self._noted:
            return TableWrites.empty()
        noted, self._noted = self._noted, []
        self._rows.clear()
        rows, places, pages = (np.concatenate(parts) for parts in zip(*noted, strict=True))
        return TableWrites(np.repeat(rows, self._page_size), self._tokens(places), self._tokens(pages))

    def _tokens(self, pages: Ints) -> Ints:
        """int64[n * page_size] from int64[n]: every token of each page."""
        return (pages[:, None] * self._page_size + np.arange(self._page_size)).ravel()
