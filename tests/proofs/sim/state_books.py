"""Host side of the recurrent states under simulation: where every slot is, and what the scheduler may count on.

Written against the structures of `StateSlots`, as the oracles of rows and pages are against theirs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from core.batch.schedule_batch import ScheduleBatch
from core.memory.companion import AdmissionFacts
from core.memory.recurrent.state_slots import NAME, StateSlots, StateWrites
from core.memory.request_memory import RequestMemory
from core.scheduler.running import RunningSet
from core.types.arrays import Ints
from core.types.request import Req
from tests.proofs.sim.plain import reach
from tests.proofs.sim.story import Hits, Violation


@dataclass(slots=True)
class StatesLeft:
    """What the host knew when it submitted a batch."""

    freed: list[int]
    """Slots that nobody has, and somebody had at the submission before."""
    kept: dict[int, int]
    """KV page -> the slot that holds the state at its end, once the batch was executed."""
    used: set[int]
    """Slots that the batch writes."""
    pending: dict[int, tuple[int, int]]
    """KV page -> (row, end) of states that are kept once their row has so many tokens: when, drafts decide."""
    reach: list[tuple[int, int]]
    """Of each row: the least tokens before the batch, and the most after it."""


class StateBooks:
    """Counts the slots of one `StateSlots`, and watches who takes them."""

    def __init__(self, host: StateSlots, hits: Hits) -> None:
        self._host, self._hits = host, hits
        self._all = list(range(1, host.size + 1))
        self._free = set(host._free)
        self._evictions = self._seen_evictions = 0
        self._resume: dict[Req, tuple[tuple[int, int], int]] = {}
        """By running request: its generation, and how many of its pages it could be resumed behind."""
        self._pending: dict[int, tuple[int, int]] = {}
        self._behind: set[int] = set()
        """Rows whose owners began behind a cached prefix, since the last look."""
        self._watch()

    def _watch(self) -> None:
        host, snapshots, hits = self._host, self._host._snapshots, self._hits
        can, admit, find, replace = host.can_admit, host.admitted, host._slot_for, host.replaced
        evict = snapshots.drop_oldest

        def can_admit(facts: AdmissionFacts) -> bool:
            allowed = can(facts)
            if not allowed:
                hits("state_refused")
            return allowed

        def admitted(row: int, facts: AdmissionFacts) -> None:
            admit(row, facts)
            if len(facts.cached):
                self._behind.add(row)

        def slot_for(turns: deque[int] | None, taken: list[int]) -> int:
            slot = find(turns, taken)
            if not slot:
                hits("state_not_kept")
            return slot

        def replaced(pages: Ints, originals: Ints) -> None:
            before = len(snapshots._slot_of.keys() & originals.tolist())
            replace(pages, originals)
            hits.counts["state_replaced"] += len(snapshots._slot_of.keys() & originals.tolist()) - before

        def drop_oldest() -> int:
            if host._free:
                raise Violation("evicted", f"a state is given up, and slots {host._free} are free")
            self._evictions += 1
            hits("state_evicted")
            return evict()

        host.can_admit, host.admitted = can_admit, admitted  # type: ignore[method-assign]
        host._slot_for, host.replaced = slot_for, replaced  # type: ignore[method-assign]
        snapshots.drop_oldest = drop_oldest  # type: ignore[method-assign]

    def check(self, memory: RequestMemory, running: RunningSet, seats: Sequence[Req]) -> None:
        """Each slot is free, or of one request that runs, or kept for one page that somebody owns."""
        host, kept = self._host, self._host._snapshots._slot_of
        held = host._slot_of.tolist()
        if sorted([*host._free, *(slot for slot in held if slot), *kept.values()]) != self._all:
            raise Violation("state_owner", f"free {host._free}, held by rows {held}, kept {kept}, of {host.size}")
        if {row for row, slot in enumerate(held) if slot} != {req.row for req in seats}:
            raise Violation("state_owner", f"slots by row {held}, but {sorted(req.row for req in seats)} run")
        free_pages = memory.allocator._stack[: memory.allocator._top].tolist()
        if not kept.keys().isdisjoint(free_pages):
            raise Violation("state_owner", f"kept for pages {kept}, of which nobody owns {set(kept) & set(free_pages)}")
        self._check_resume(memory, running, seats)

    def _check_resume(self, memory: RequestMemory, running: RunningSet, seats: Sequence[Req]) -> None:
        """How far a running request could be resumed after this step, were it to give way, never falls by itself.

        Counted in pages that hold known tokens only: a state behind a token that proves to be for nothing goes with
        that token's page. Not asked of a row of which more is planned for certain than is known, as `StateSlots` says.
        """
        kept, before, self._resume = self._host._snapshots._slot_of, self._resume, {}
        evicted, self._seen_evictions = self._evictions != self._seen_evictions, self._evictions
        if not kept and not before:
            return
        for req in seats:
            if req.row in self._behind and req.retractions:
                self._hits("state_resumed_retraction")
            row = req.row
            whole = int(min(running.known[row], running.planned[row])) // memory.page_size
            pages = memory._pages[row, :whole].tolist()
            best = next((place for place in range(len(pages), 0, -1) if pages[place - 1] in kept), 0)
            self._resume[req] = (owner := (row, req.generation), best)
            seated, was = before.get(req, ((0, -1), 0))
            if seated == owner and best < was and not evicted and not running.unseen[row]:
                text = f"{req.sink.name} could be resumed behind {was} pages, now behind {best}; nobody took the state"
                raise Violation("state_resume", text)
        self._behind.clear()

    def leave(self, batch: ScheduleBatch, flying: Sequence[StatesLeft]) -> StatesLeft:
        """See `CompanionSide`."""
        host, writes = self._host, batch.companion_writes.get(NAME)
        free = set(host._free)
        freed = sorted(free - self._free)
        self._free = free
        used = set(host._slot_of[batch.rows].tolist())
        if writes is not None:
            self._count(batch, writes, flying)
            used.update(writes.tracked.slots.tolist())
            self._await(batch, writes)
        kept, pending = dict(host._snapshots._slot_of), self._pending
        self._pending = {
            page: (row, end) for page, (row, end) in pending.items() if page in kept and host._pending[row] == end
        }
        firsts, counts = reach(batch)
        spans = list(zip(firsts.tolist(), (firsts + counts).tolist(), strict=True))
        return StatesLeft(freed, kept, used, dict(self._pending), spans)

    def _await(self, batch: ScheduleBatch, writes: StateWrites) -> None:
        """Note states of decode rows that may prove to be for a later step."""
        tracked = writes.tracked
        page_of = {slot: page for page, slot in self._host._snapshots._slot_of.items()}
        found = zip(tracked.places.tolist(), tracked.ends.tolist(), tracked.slots.tolist(), strict=True)
        for place, end, slot in found:
            if place >= batch.num_extend and batch.spec is not None:
                page = page_of[slot]
                self._hits("state_due_again" if page in self._pending else "state_due")
                self._pending[page] = (int(batch.rows[place]), end)

    def _count(self, batch: ScheduleBatch, writes: StateWrites, flying: Sequence[StatesLeft]) -> None:
        hits = self._hits
        taken = {*writes.slots.tolist(), *writes.tracked.slots.tolist()}
        for source in writes.sources.tolist():
            hits("state_resumed" if source else "state_cleared")
            if source in taken:
                hits("state_source_taken")
        tracked = writes.tracked
        branches = self._host._marks[batch.rows[tracked.places], 0] == tracked.ends
        hits.counts["state_kept_at_branch"] += int(branches.sum())
        for place in tracked.places.tolist():
            hits("state_kept_in_prompt" if place < batch.num_extend else "state_kept_in_decode")
        if any(not taken.isdisjoint(left.used) for left in flying):
            hits("state_reused_in_flight")
