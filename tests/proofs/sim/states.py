"""Recurrent states under simulation: production `StateSlots`, and a pool in plain integers that does as it is told.

A state is the hash of all tokens that it consumed, in order: after n tokens it is exactly what the KV slot of the nth
holds. The KV is proven right first (`kv_memory.py`), so one comparison tells whether a row goes on from its own past.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from core.batch.schedule_batch import ScheduleBatch
from core.memory.recurrent.state_slots import NAME, StateSlots, StateWrites, Tracked
from core.memory.recurrent.state_snapshots import Tracking
from core.memory.request_memory import RequestMemory
from core.scheduler.running import RunningSet
from core.types.request import Req
from tests.proofs.sim.companions import CompanionSide, Owner
from tests.proofs.sim.kv_memory import UNWRITTEN, KVMemory, Table
from tests.proofs.sim.plain import Plain
from tests.proofs.sim.reference import ROOT, link
from tests.proofs.sim.scenario import Scenario
from tests.proofs.sim.state_books import StateBooks, StatesLeft
from tests.proofs.sim.story import Hits, Violation

CLEAR = 0
"""A slot without a past, as production clears it."""


def absorb(state: int, ids: Sequence[int], start: int, root: int = ROOT) -> int:
    """The state after `ids` at positions `start` and on; a cleared one begins with `root`."""
    state = state or root
    for position, token in enumerate(ids, start):
        state = link(state, token, position)
    return state


class StateSide(CompanionSide):
    """What both device sides share: the books, the contract of the writes, and the two looks at what slots hold."""

    def __init__(self, scenario: Scenario, hits: Hits) -> None:
        states = scenario.states
        assert states is not None, "a scenario without recurrent states has no such side"
        # As the engine is built: without a cache no request would find a state again; two steps take two buffers, as
        # does one that verifies drafts.
        buffers = scenario.depth if scenario.drafts is None else 2
        tracking = Tracking(scenario.page_size, states.interval, buffers) if scenario.cache != "none" else None
        self.room = scenario.draft_room or 0
        self.host = StateSlots(states.slots, scenario.rows + 1, tracking, self.room)
        self.books = StateBooks(self.host, hits)
        self._page_size = scenario.page_size
        self._hits = hits
        self._reach: list[tuple[int, int]] = []

    @abstractmethod
    def held(self, slots: Sequence[int]) -> list[int]:
        """What `slots` hold on the device."""

    @abstractmethod
    def slots_of(self, rows: Sequence[int]) -> list[int]:
        """Where the device looks for the states of `rows`; 0 where it knows none."""

    @abstractmethod
    def forget(self, rows: Sequence[int], slots: Sequence[int]) -> None:
        """Poison the mapping of `rows`, and `slots`: nobody has them now."""

    @abstractmethod
    def advance(self, plain: Plain, ids: list[int]) -> list[int]:
        """The states of all rows after the step, written back, with those kept that were to be kept. Where drafts are
        verified, the states after each token, and none written back.
        """

    def check(self, memory: RequestMemory, running: RunningSet, seats: Sequence[Req]) -> None:
        """See `CompanionSide`."""
        self.books.check(memory, running, seats)

    def leave(self, batch: ScheduleBatch, flying: Sequence[StatesLeft]) -> StatesLeft:
        """See `CompanionSide`."""
        return self.books.leave(batch, flying)

    def told(self, batch: ScheduleBatch) -> str:
        """See `CompanionSide`."""
        writes: StateWrites | None = batch.companion_writes.get(NAME)
        if writes is None:
            return ""
        rows = zip(writes.rows.tolist(), writes.slots.tolist(), writes.sources.tolist(), strict=True)
        lines = [f"row {row} in {slot} {f'as {source} was' if source else 'cleared'}" for row, slot, source in rows]
        tracked = writes.tracked
        kept = zip(tracked.places.tolist(), tracked.ends.tolist(), tracked.slots.tolist(), strict=True)
        lines += [f"row {batch.rows[place]} at {end} kept in {slot}" for place, end, slot in kept]
        return f"states: {', '.join(lines)}"

    def take_back(self, owners: Sequence[Owner], left: StatesLeft) -> None:
        """See `CompanionSide`."""
        self.forget([row for row, _ in owners], left.freed)
        self._reach = left.reach

    def check_writes(self, plain: Plain, writes: StateWrites | None) -> None:
        """Exactly the new owners get a slot; what is kept ends pages, in slots that nobody else writes."""
        rows = [] if writes is None else writes.rows.tolist()
        if sorted(rows) != sorted(plain.fresh):
            raise Violation("state_writes", f"step {plain.step_id}: slots for rows {rows}, new owners in {plain.fresh}")
        if writes is None:
            return
        slots, places, into = writes.slots.tolist(), writes.tracked.places.tolist(), writes.tracked.slots.tolist()
        mapping = dict(zip(plain.rows, self.slots_of(plain.rows), strict=True)) | dict(zip(rows, slots, strict=True))
        written = [*mapping.values(), *into]
        if len(set(written)) != len(written) or min(written) < 1 or max(written) > self.host.size:
            text = f"step {plain.step_id} writes the states of rows {mapping}, and keeps some in {into}"
            raise Violation("state_writes", text)
        cuts = list(zip(places, writes.tracked.ends.tolist(), strict=True))
        if cuts != sorted(set(cuts)):
            raise Violation("state_writes", f"step {plain.step_id} keeps states at (place, end) {cuts}")
        for place, end in cuts:
            least, most = self._reach[place]
            if not least < end <= most or end % self._page_size:
                text = f"row {plain.rows[place]} from {least} to {most} at most: kept at {end}"
                raise Violation("state_writes", text)

    def run(self, plain: Plain, ids: list[int], tables: list[Table], kv: KVMemory) -> list[int]:
        """See `CompanionSide`. Every row must find the hash of the tokens in front of this step."""
        slots = self.slots_of(plain.rows)
        for row, start, table, slot, held in zip(
            plain.rows, plain.starts, tables, slots, self.held(slots), strict=True
        ):
            expected = kv.at(table[start - 1]) if start else CLEAR
            if held != expected:
                what = "never written" if held == UNWRITTEN else "it was cleared" if not held else "of another prefix"
                raise Violation("state_read", f"row {row} goes on behind {start} tokens from slot {slot}: {what}")
        return self.advance(plain, ids)

    def look_back(self, kv: KVMemory, left: StatesLeft) -> None:
        """See `CompanionSide`. A state that is kept for a page is the one at its end."""
        size, kept = self._page_size, left.kept
        for (page, slot), held in zip(kept.items(), self.held(list(kept.values())), strict=True):
            if page in left.pending:
                row, end = left.pending[page]
                if self.lens[row] < end:
                    self._hits("state_not_there")
                    continue
            if held == UNWRITTEN or held != kv.at((page + 1) * size - 1):
                text = f"slot {slot} is kept for page {page}, and does not hold what its prefix comes to"
                raise Violation("state_snapshot", text)


class StateTwin(StateSide):
    """Slots and mapping as lists."""

    def __init__(self, scenario: Scenario, hits: Hits) -> None:
        super().__init__(scenario, hits)
        self._held = [UNWRITTEN] * (self.host.size + 1)
        self._mapping = [0] * (scenario.rows + 1)
        self._tracked = Tracked()
        self._tried: list[tuple[int, int, list[int]]] = []
        """Row, tokens before it, and the states behind each of its tokens, in a step that verifies drafts."""

    def held(self, slots: Sequence[int]) -> list[int]:
        """See `StateSide`."""
        return list(map(self._held.__getitem__, slots))

    def slots_of(self, rows: Sequence[int]) -> list[int]:
        """See `StateSide`."""
        return list(map(self._mapping.__getitem__, rows))

    def forget(self, rows: Sequence[int], slots: Sequence[int]) -> None:
        """See `StateSide`."""
        for row in rows:
            self._mapping[row] = 0
        for slot in slots:
            self._held[slot] = UNWRITTEN

    def begin(self, writes: StateWrites | None) -> None:
        """See `CompanionSide`. All sources are read before any slot is written."""
        self._tracked = Tracked()
        if writes is None:
            return
        self._tracked = writes.tracked
        states = [self._held[source] if source else CLEAR for source in writes.sources.tolist()]
        for row, slot, state in zip(writes.rows.tolist(), writes.slots.tolist(), states, strict=True):
            self._mapping[row] = slot
            self._held[slot] = state

    def advance(self, plain: Plain, ids: list[int]) -> list[int]:
        """See `StateSide`. A row is cut where its state is kept, and goes on behind the cut."""
        states = list[int]()
        self._tried = []
        pieces = zip(plain.rows, plain.starts, plain.roots, plain.pieces(ids), strict=True)
        for row, start, root, piece in pieces:
            state, behind = self._held[self._mapping[row]], list[int]()
            for position, token in enumerate(piece, start):
                behind.append(state := absorb(state, [token], position, root))
            self._tried.append((row, start, behind))
            states += behind if plain.verifies else behind[-1:]
        if not plain.verifies:
            self.judged(plain.lens)
        return states

    def judged(self, counts: list[int]) -> None:
        """See `CompanionSide`."""
        tracked = self._tracked
        for place, end, slot in zip(
            *(each.tolist() for each in (tracked.places, tracked.ends, tracked.slots)), strict=True
        ):
            _, start, behind = self._tried[place]
            if start < end <= start + counts[place]:
                self._held[slot] = behind[end - start - 1]
        for (row, _, behind), count in zip(self._tried, counts, strict=True):
            self._held[self._mapping[row]] = behind[count - 1]
