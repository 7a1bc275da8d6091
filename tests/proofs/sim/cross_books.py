"""The host's cross pages, watched: who holds which, and what was freed between two submissions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from core.batch.schedule_batch import ScheduleBatch
from core.memory.companion import AdmissionFacts
from core.memory.cross.cross_pages import CROSS, CrossPages, CrossWrites
from core.types.arrays import Ints
from core.types.request import Req
from tests.proofs.sim.story import Hits, Violation


@dataclass(slots=True)
class CrossLeft:
    """What the host knew when it submitted a batch."""

    freed: list[int]
    """Cross pages that were freed since the submission before; some may have a new owner."""
    slots: dict[int, list[int]]
    """By running row: where the host thinks that its input is kept."""


class CrossBooks:
    """Stands on the instance of the host side."""

    def __init__(self, host: CrossPages, budget: int, hits: Hits) -> None:
        self._host, self._budget, self._hits = host, budget, hits
        self._freed: list[int] = []
        self._slots: dict[int, list[int]] = {}
        self._known: dict[int, int] = {}
        """By row: the generation that was seen in it."""
        self._watch()

    def _watch(self) -> None:
        host, hits, size = self._host, self._hits, self._host.allocator.page_size
        can_admit, admitted, released, free = host.can_admit, host.admitted, host.released, host.allocator.free

        def may(facts: AdmissionFacts) -> bool:
            allowed = can_admit(facts)
            if not allowed:
                hits("cross_refused")
            return allowed

        def took(row: int, facts: AdmissionFacts) -> None:
            admitted(row, facts)
            pages = host._pages[row].tolist()
            slots = [page * size + within for page in pages for within in range(size)]
            self._slots[row] = slots[: facts.encoder_tokens]
            hits("cross_fills_pool" if len(pages) == host.allocator.num_pages else "cross_admitted")

        def gone(row: int) -> None:
            released(row)
            self._slots.pop(row, None)

        def freed(pages: Ints) -> None:
            free(pages)
            self._freed += pages.tolist()

        host.can_admit, host.admitted, host.released = may, took, gone  # type: ignore[method-assign]
        host.allocator.free = freed  # type: ignore[method-assign]

    def check(self, seats: Sequence[Req]) -> None:
        """Each cross page is free or of one row that runs, which has as many as its input needs."""
        host, allocator = self._host, self._host.allocator
        free = allocator._stack[: allocator._top].tolist()
        by_row = {row: pages.tolist() for row, pages in enumerate(host._pages) if len(pages)}
        owned = [page for pages in by_row.values() for page in pages]
        if sorted(free + owned) != list(range(1, allocator.num_pages + 1)):
            raise Violation("cross_owner", f"free {free}, by row {by_row}, of {allocator.num_pages}")
        needed = {req.row: -(-req.sink.encoder_len // allocator.page_size) for req in seats}
        if {row: len(pages) for row, pages in by_row.items()} != needed:
            raise Violation("cross_owner", f"by row {by_row}, those who run need {needed}")
        for req in seats:
            if self._known.get(req.row) != req.generation:
                self._known[req.row] = req.generation
                if req.retractions:
                    self._hits("cross_encoded_again")

    def leave(self, batch: ScheduleBatch, flying: Sequence[CrossLeft]) -> CrossLeft:
        """See `CompanionSide.leave`."""
        self._count(batch, flying)
        freed, self._freed = self._freed, []
        return CrossLeft(freed, dict(self._slots))

    def _count(self, batch: ScheduleBatch, flying: Sequence[CrossLeft]) -> None:
        lens = batch.encoder_lens.tolist()
        if not lens:
            return
        hits = self._hits
        if max(lens) > self._budget:
            hits("cross_over_budget")
        if len(lens) > 1:
            hits("cross_together")
        if batch.num_decode:
            hits("cross_beside_decode")
        writes: CrossWrites = batch.companion_writes[CROSS]
        taken = set(writes.slots.tolist())
        if any(not taken.isdisjoint(slots) for left in flying for slots in left.slots.values()):
            hits("cross_reused_in_flight")
