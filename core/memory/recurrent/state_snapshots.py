"""Snapshots of recurrent states, one for a KV page: a prefix that ends with that page resumes from it. Host side."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from core.types.arrays import Ints


@dataclass(frozen=True, slots=True)
class Tracking:
    """When snapshots are taken: at the last page boundary inside a prompt, then every `interval` tokens.

    `interval` is a whole number of pages, in tokens. A decoding request keeps its newest `buffers` snapshots and
    overwrites the oldest (SGLang's ping-pong track buffer). With two, a step in flight whose result is dropped spoils
    only one.
    """

    page_size: int
    interval: int
    buffers: int


class StateSnapshots:
    """KV page -> state slot with the state at the page's end, the least recently used first. One page per slot."""

    def __init__(self) -> None:
        self._slot_of: dict[int, int] = {}
        """KV page -> slot. Its order is the order of use."""
        self._shared: set[int] = set()
        """Pages in `_slot_of` that other requests read too: the request that took one must not reuse its slot."""

    def __len__(self) -> int:
        return len(self._slot_of)

    @property
    def slots(self) -> Iterable[int]:
        """Slots in use, the least recently used first."""
        return self._slot_of.values()

    def find(self, page: int) -> int:
        """The slot that holds the state at the end of `page`; 0 when none does."""
        return self._slot_of.get(page, 0)

    def longest(self, pages: Ints) -> int:
        """Length in pages of the longest prefix of `pages`, int64[k], whose last page has a snapshot: 0..k."""
        kept = (place for place in range(len(pages), 0, -1) if int(pages[place - 1]) in self._slot_of)
        return next(kept, 0)

    def keep(self, page: int, slot: int) -> None:
        """`slot` holds the state at the end of `page`, which becomes the most recently used."""
        # Popped first: assigning to a key that exists would leave it at its old place in the order.
        self._slot_of.pop(page, None)
        self._slot_of[page] = slot

    def share(self, pages: Iterable[int]) -> None:
        """A request reads `pages` that it did not compute: mark their snapshots as shared."""
        self._shared.update(self._slot_of.keys() & pages)

    def drop(self, page: int) -> int:
        """Forget what is kept for `page`; returns its slot, 0 when there was none."""
        self._shared.discard(page)
        return self._slot_of.pop(page, 0)

    def drop_own(self, page: int) -> int:
        """Forget the snapshot of `page` for the request that took it; returns its slot, 0 if there is none to give.

        A snapshot that other requests share stays.
        """
        return 0 if page in self._shared else self.drop(page)

    def drop_oldest(self) -> int:
        """Forget the least recently used snapshot and return its slot. There must be at least one."""
        return self.drop(next(iter(self._slot_of)))
