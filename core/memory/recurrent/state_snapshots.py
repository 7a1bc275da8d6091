"""Recurrent states kept for pages: what a prefix that ends with such a page can be resumed from. Host side."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from core.types.arrays import Ints


@dataclass(frozen=True, slots=True)
class Tracking:
    """When states are kept: at the last page boundary inside a prompt, then every `interval` tokens.

    `interval` is a whole number of pages. `buffers` slots take turns for what a running request keeps while it decodes
    (SGLang's ping-pong track buffer): with two, a step in flight that proves to be for nothing spoils only one.
    """

    page_size: int
    interval: int
    buffers: int


class StateSnapshots:
    """Which page's end is kept in which state slot, the least recently used first. A slot is kept for one page."""

    def __init__(self) -> None:
        self._slot_of: dict[int, int] = {}
        """KV page -> slot."""
        self._shared: set[int] = set()
        """Pages, of those above, that somebody beside the maker of their snapshot has: it is not his to overwrite."""

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
        """How many of `pages` make the longest prefix whose end is kept."""
        kept = (place for place in range(len(pages), 0, -1) if int(pages[place - 1]) in self._slot_of)
        return next(kept, 0)

    def keep(self, page: int, slot: int) -> None:
        """`slot` holds the end of `page` from now on, or was just used for it."""
        self._slot_of.pop(page, None)
        self._slot_of[page] = slot

    def share(self, pages: Iterable[int]) -> None:
        """Requests have `pages` that did not compute them, and count on what is kept for them."""
        self._shared.update(self._slot_of.keys() & pages)

    def drop(self, page: int) -> int:
        """Forget what is kept for `page`; returns its slot, 0 when there was none."""
        self._shared.discard(page)
        return self._slot_of.pop(page, 0)

    def drop_own(self, page: int) -> int:
        """As `drop`, for whoever made the snapshot; 0 as well when others count on it."""
        return 0 if page in self._shared else self.drop(page)

    def drop_oldest(self) -> int:
        """Forget the least recently used snapshot, of which there must be one; returns its slot."""
        return self.drop(next(iter(self._slot_of)))
