"""Which KV pages are free. Host state only; pages are numbers, the tensors behind them are the KV pool's."""

from __future__ import annotations

import numpy as np

from core.invariants import check
from core.types.arrays import Ints


class PagedKVAllocator:
    """Hands out pages 1..num_pages of `page_size` tokens each; page 0 is padding and never leaves (law 6).

    A freed page may be handed out at once: its old owner's last write and its new owner's first are in one stream
    order (law 4). What a request moves is often a page or two, of which sets of Python tell more in a tenth of the time
    that reductions of numpy take; a thousand pages take 0.1 ms.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        check("page_conservation", num_pages >= 1 and page_size >= 1, num_pages=num_pages, page_size=page_size)
        self.num_pages = num_pages
        self.page_size = page_size
        self._held = np.zeros(num_pages + 1, np.bool_)
        # Invariant: _stack[:_top] are the free pages, disjoint from the held ones, together exactly 1..num_pages.
        # What lies at and above _top is left over from earlier pages and means nothing.
        self._stack: Ints = np.arange(num_pages, 0, -1, dtype=np.int64)
        self._top = num_pages

    @property
    def available(self) -> int:
        """Pages that `alloc` could hand out now."""
        return self._top

    @property
    def held(self) -> int:
        """Pages out of the free list: owned by requests or by the prefix cache."""
        return self.num_pages - self._top

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens.

        The check at entry and admission both use this one formula: with two of them a request near the capacity could
        pass the check and never be admitted.
        """
        return -(-tokens // self.page_size)

    def alloc(self, count: int) -> Ints | None:
        """`count` pages as int64[count], or None when there are fewer; None changes nothing."""
        if count > self._top:
            return None
        self._top -= count
        pages = self._stack[self._top : self._top + count].copy()
        check("page_double_free", np.count_nonzero(self._held[pages]) == 0, count=count)
        self._held[pages] = True
        return pages

    def free(self, pages: Ints) -> None:
        """Take `pages`, int64[n], back. Raises InvariantViolation for one that is free, given twice or out of range."""
        count, distinct = len(pages), set(pages.tolist())
        if count == 0:
            return
        check("page_padding_reserved", min(distinct) > 0 and max(distinct) <= self.num_pages, pages=count)
        check("page_double_free", len(distinct) == count == np.count_nonzero(self._held[pages]), pages=count)
        self._held[pages] = False
        self._stack[self._top : self._top + count] = pages
        self._top += count

    def check_integrity(self) -> None:
        """Recompute the partition into free and held pages; raises InvariantViolation naming what is off."""
        free = np.zeros(self.num_pages + 1, np.bool_)
        free[self._stack[: self._top]] = True
        check("page_padding_reserved", not free[0] and not self._held[0])
        check("page_conservation", int(free.sum()) == self._top, free=self._top)
        check("page_conservation", bool((free ^ self._held)[1:].all()), free=self._top, held=int(self._held.sum()))
