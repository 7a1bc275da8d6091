"""Nothing is evicted while there is room: from the prefix cache exactly as many pages go as an allocation is short of.

The bound is exact, with pages of any size: the cache cuts its last edge, so an eviction gives up `count - free` pages
for an allocation of `count`, and all it can where that is not enough (the allocation then fails, and takes none).
A state that is kept goes for a slot only when no slot is free, and an idle window page only when none is.
"""

from __future__ import annotations

from core.types.arrays import Ints
from tests.proofs.sim.family import Family, View
from tests.proofs.sim.story import Violation


class Evictions(Family):
    """Stands on the instances of cache and allocator."""

    def __init__(self, view: View) -> None:
        super().__init__(view)
        self._evicted = 0
        """Pages that were evicted since the last allocation."""
        self._watch()

    def _watch(self) -> None:
        allocator, cache, hits = self.view.memory.allocator, self.view.memory.cache, self.view.hits
        evict, alloc, clear = cache.evict, allocator.alloc, cache.clear

        def evicted(count: int) -> Ints:
            pages = evict(count)
            self._evicted += len(pages)
            if len(pages):
                hits("page_evicted")
            return pages

        def allocated(count: int) -> Ints | None:
            gone, self._evicted = self._evicted, 0
            # Evicted pages were freed by now: what was free before them was too little by `short`.
            short = count - (allocator._top - gone)
            if gone > max(0, short):
                raise Violation("evicted", f"{gone} pages evicted, {max(0, short)} are short of {count}")
            return alloc(count)

        def cleared(tenant: str | None = None) -> Ints:
            # All is given up with what computed it, not for an allocation.
            before = self._evicted
            pages = clear(tenant)
            self._evicted = before
            return pages

        cache.evict, allocator.alloc, cache.clear = evicted, allocated, cleared  # type: ignore[method-assign]

    def after_step(self) -> None:
        """What was evicted was evicted for an allocation."""
        if self._evicted:
            raise Violation("evicted", f"{self._evicted} pages evicted, and no page was asked for")
