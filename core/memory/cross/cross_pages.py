"""Which pages hold the encoder output of each request. Host side of the "cross_page" pool."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from core.invariants import check
from core.memory.companion import AdmissionFacts
from core.memory.kv_allocator import PagedKVAllocator
from core.types.arrays import Ints
from core.types.stats import PoolStats

CROSS = "cross_page"
NO_PAGES: Ints = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class CrossWrites:
    """What a step needs for cross attention: table entries of the inputs it encodes, and what its decoder tokens see.

    table[rows[i], places[i]] = slots[i], int64[E] each: E encoder tokens, request after request in batch order, as the
    staged encoder ids.
    """

    rows: Ints
    places: Ints
    slots: Ints
    batch_places: Ints
    """int64[T]: the row of each decoder token, as an index into the rows of the batch."""
    last_places: Ints
    """int64[T]: the last encoder token that each decoder token sees; it sees all before that."""


class CrossPages:
    """Pages for encoder outputs, apart from the KV pages of the decoder. A `Companion`.

    A request takes all of its pages at admission, because its input is known and encoded in one piece, and keeps them
    until it is retracted or ends. They never grow, so no request is retracted for want of them. Nothing is cached.
    """

    name = CROSS

    def __init__(self, num_pages: int, page_size: int, num_rows: int) -> None:
        self.allocator = PagedKVAllocator(num_pages, page_size)
        self._pages: list[Ints] = [NO_PAGES] * num_rows
        """By request row. Invariant: together exactly the held pages, each once."""
        self._lens: Ints = np.zeros(num_rows, np.int64)
        """By request row: tokens of its encoder input, at least 1; 0 for a row without an owner."""
        # A padded row reads one token, in slot 0.
        self._lens[0] = 1
        self._fresh: set[int] = set()
        """Rows whose input is not encoded by any planned step yet."""

    def resumable(self, pages: Ints) -> int:
        """0: cached decoder KV was computed for some encoder input, and the cache does not know for which."""
        return 0

    def fits_alone(self, total_tokens: int, encoder_tokens: int) -> bool:
        """Whether the whole pool holds the encoder's input; decoder tokens take nothing here."""
        return self.allocator.pages_for(encoder_tokens) <= self.allocator.num_pages

    def can_admit(self, facts: AdmissionFacts) -> bool:
        """Whether enough pages are free for the encoder's input."""
        return self.allocator.pages_for(facts.encoder_tokens) <= self.allocator.available

    def would_admit(self, facts: AdmissionFacts, leaving: Ints) -> bool:
        """As `can_admit`, counting the pages of rows `leaving`: cross pages are never shared, so all become free."""
        coming = sum(len(self._pages[row]) for row in leaving.tolist())
        return self.allocator.pages_for(facts.encoder_tokens) <= self.allocator.available + coming

    def admitted(self, row: int, facts: AdmissionFacts) -> None:
        """Take all pages of the encoder's input. Raises InvariantViolation if that is empty or the row holds pages."""
        check("row_padding_reserved", row > 0, row=row)
        check("cross_page_conservation", self._lens[row] == 0, row=row, held=len(self._pages[row]))
        check("cross_row_encoded", facts.encoder_tokens > 0, row=row)
        pages = self.allocator.alloc(self.allocator.pages_for(facts.encoder_tokens))
        check("cross_page_conservation", pages is not None, row=row, available=self.allocator.available)
        assert pages is not None
        self._pages[row] = pages
        self._lens[row] = facts.encoder_tokens
        self._fresh.add(row)

    def planned(
        self, rows: Ints, prefix_lens: Ints, extend_lens: Ints, pages: Ints, ahead: Ints | None = None
    ) -> CrossWrites:
        """Table entries of inputs admitted since the last step, and the encoder tokens that each decoder token sees.

        An input is encoded in the first step planned after its admission, with the request's first decoder tokens.
        Raises InvariantViolation if that step leaves out a row admitted since the last one.
        """
        lens = self._lens[rows]
        check("cross_row_encoded", bool((lens > 0).all()), rows=len(rows))
        fresh = [row for row in rows.tolist() if row in self._fresh] if self._fresh else []
        # The input of a row that is admitted but not in this step would never be encoded: `_fresh` is emptied here.
        check("cross_row_encoded", len(fresh) == len(self._fresh), planned=len(fresh), admitted=len(self._fresh))
        self._fresh.clear()
        counts = self._lens[fresh]
        return CrossWrites(
            rows=np.repeat(np.asarray(fresh, np.int64), counts),
            places=np.concatenate([NO_PAGES, *(np.arange(count) for count in counts.tolist())]),
            # NO_PAGES: `concatenate` refuses an empty list.
            slots=np.concatenate([NO_PAGES, *(self.slots(row) for row in fresh)]),
            batch_places=np.repeat(np.arange(len(rows)), extend_lens),
            last_places=np.repeat(lens - 1, extend_lens),
        )

    def slots(self, row: int) -> Ints:
        """int64[L]: the slots of the L encoder tokens of `row`, in order."""
        within = np.arange(self.allocator.page_size)
        slots: Ints = (self._pages[row][:, None] * self.allocator.page_size + within).ravel()[: self._lens[row]]
        return slots

    def released(self, row: int) -> None:
        """Free the pages of `row`. Raises InvariantViolation on a second release."""
        check("cross_page_double_free", row > 0 and self._lens[row] > 0, row=row)
        self.allocator.free(self._pages[row])
        self._pages[row] = NO_PAGES
        self._lens[row] = 0
        self._fresh.discard(row)

    def replaced(self, pages: Ints, originals: Ints) -> None:
        """No-op: nothing here belongs to KV pages of the decoder."""

    def freed(self, pages: Ints) -> None:
        """No-op: nothing here belongs to KV pages of the decoder."""

    def stats(self) -> tuple[PoolStats, ...]:
        """Pages held by running requests."""
        return (PoolStats(CROSS, self.allocator.num_pages, self.allocator.held),)

    def check_integrity(self) -> None:
        """Recompute which row holds which pages; raises InvariantViolation naming what is off."""
        self.allocator.check_integrity()
        check("row_padding_reserved", len(self._pages[0]) == 0 and self._lens[0] == 1)
        owned = np.concatenate(self._pages)
        held = self.allocator.held
        check("cross_page_conservation", len(np.unique(owned)) == len(owned) == held, owned=len(owned), held=held)
        for row in range(1, len(self._pages)):
            need = self.allocator.pages_for(int(self._lens[row]))
            check("cross_page_conservation", len(self._pages[row]) == need, row=row, need=need)
