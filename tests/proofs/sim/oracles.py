"""What must hold after every step of the scheduler, whatever happened in it.

Written against the structures, not through the methods that keep them: an accountant does not ask the cashier. The
cheap checks run after every step; those that walk the radix tree run after some, and when everybody has left.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from core.batch.schedule_batch import ScheduleBatch
from core.memory.request_memory import RequestMemory
from core.scheduler.scheduler import Scheduler
from core.types.request import Req, RequestState
from tests.proofs.sim.bounds import Bounds
from tests.proofs.sim.clients import Client, Clients
from tests.proofs.sim.conservation import Conservation
from tests.proofs.sim.device import SimExecutor
from tests.proofs.sim.evictions import Evictions
from tests.proofs.sim.fairness import Fairness
from tests.proofs.sim.family import Family, View
from tests.proofs.sim.liveness import Liveness
from tests.proofs.sim.measures import Measures
from tests.proofs.sim.order import Order
from tests.proofs.sim.scenario import Scenario
from tests.proofs.sim.seating import Seating
from tests.proofs.sim.story import Hits, Violation
from tests.proofs.sim.structures import tree

THOROUGH_EVERY = 32

FAMILIES: tuple[type[Family], ...] = (Seating, Bounds, Evictions, Order, Conservation, Fairness, Measures)
"""All others, in the order in which they look; `Seating` and `Bounds` first, which they count on."""


class Oracles:
    """Looks at one scheduler, its memory, its device and its clients."""

    def __init__(
        self, scenario: Scenario, scheduler: Scheduler, device: SimExecutor, clients: Clients, hits: Hits
    ) -> None:
        self._scheduler = scheduler
        self._memory = scheduler.memory
        self._device = device
        self._clients = clients
        # A tenant with less than its part of a full queue is let in.
        parts = (scenario.config.max_queued_requests // count for count in range(1, len(scenario.weights) + 1))
        self._queue_bound = sum(parts) + scenario.rows
        self._looks = 0
        self._drafts = scenario.drafts is not None
        self._view = View(scenario, scheduler, device, clients, hits)
        self._liveness = Liveness(self._view)
        self._families = (*(family(self._view) for family in FAMILIES), self._liveness)

    def before_step(self, now: float) -> None:
        """The scheduler steps at `now`."""
        self._view.now = now

    def planned(self, batch: ScheduleBatch | None) -> None:
        """The planner answered."""
        for family in self._families:
            family.planned(batch)

    def begin_to_finish(self) -> None:
        """Nothing arrives from now on."""
        self._liveness.begin()

    def after_step(self, due: list[Client], now: float) -> None:
        """Everything cheap; now and then everything. `due`: whose end was asked for before the step."""
        check_pages(self._memory)
        seats = self._check_states()
        for side in self._device.sides:
            side.check(self._memory, self._scheduler.running, seats)
        self._check_ends(due, now)
        for family in self._families:
            family.after_step()
        if self._device.in_flight > self._device.depth:
            raise Violation("executor_depth", f"{self._device.in_flight} steps in flight")
        self._looks += 1
        if self._looks % THOROUGH_EVERY == 0:
            check_thoroughly(self._memory)
            check_tenants(self._memory, seats)

    def after_idle_step(self) -> None:
        """The step had nothing to take and planned nothing, and nothing is in flight: then nobody may be waiting."""
        scheduler = self._scheduler
        if scheduler.held or len(self._memory.leases):
            # What waits for leased pages is woken when their transfer is over, what is held when it goes on.
            return
        if len(scheduler.waiting) or len(scheduler.running):
            raise Violation(
                "wedged", f"{len(scheduler.waiting)} wait, {len(scheduler.running)} run, nothing is planned"
            )

    def when_empty(self) -> None:
        """Nobody is left: every row and page is free or cached, and nothing is locked."""
        memory = self._memory
        check_pages(memory)
        check_thoroughly(memory)
        for family in self._families:
            family.when_empty()
        for side in self._device.sides:
            side.check(memory, self._scheduler.running, [])
        if memory.rows.used or memory.owned_pages() or memory.cache.locked_pages or len(memory.leases):
            text = f"{memory.rows.used} rows, {memory.owned_pages()} pages, {memory.cache.locked_pages} locked"
            raise Violation("leak", f"everybody left, but {text} are still held")
        used = {pool.name: pool.used for pool in memory.stats()}
        if any(used.values()):
            raise Violation("leak", f"everybody left, but the pools say {used}")

    def _check_states(self) -> list[Req]:
        """Each live request is in exactly one place, and knows it; a row has one owner, and no two requests a row.

        Returns those who run.
        """
        scheduler, live, rows = self._scheduler, self._clients.live, self._memory.rows
        running, waiting, intake = scheduler.running, scheduler.waiting, scheduler.intake
        seats = [req for req in running.reqs if req is not None]
        queued = len(waiting) + (len(intake.members()) if len(intake) else 0)
        # A retracted request goes back into the queue whether it is full or not.
        if queued > self._queue_bound:
            raise Violation("queue_bound", f"{queued} wait, at most {self._queue_bound} may")
        if (
            queued + len(seats) != len(live)
            or rows.used != len(seats)
            or running._member.tolist().count(True) != rows.used
        ):
            text = f"{len(live)} live: {queued} wait, {len(seats)} run ({rows.used} rows held)"
            raise Violation("one_place", text)
        generations, counts = rows.generations.tolist(), self._memory._count.tolist()
        known, planned, ends = running.known.tolist(), running.planned.tolist(), running.prefill_end.tolist()
        lower = running.planned_lower.tolist()
        for req in seats:
            row = req.row
            if req not in live or req.state is not RequestState.RUNNING or req in waiting:
                raise Violation("one_place", f"row {row} is taken by a request that is {req.state.value}")
            if running.reqs[row] is not req or generations[row] != req.generation or row < 1:
                raise Violation("one_owner", f"request of row {row} generation {req.generation}: not the owner")
            req.sink.owner = (row, req.generation)
            self._check_lengths(req, known[row], planned[row], lower[row], ends[row], counts[row])
        seated = sum(req.row > 0 and req.state is RequestState.RUNNING for req in live)
        if seated != len(seats):
            raise Violation("one_place", f"{seated} of the live requests think that they run, {len(seats)} do")
        return seats

    def _check_lengths(self, req: Req, known: int, planned: int, lower: int, end: int, pages: int) -> None:
        """KV length == prompt + emitted, as the plan claims, and the pages that it takes are there. With drafts in
        flight, at least as the plan claims; `Bounds` says how much more, and none of it is computed behind the end.
        """
        client: Client = req.sink
        emitted = len(client.tokens)
        if known != req.prompt_len + emitted:
            raise Violation("kv_length", f"{client.name}: {known} known, prompt {req.prompt_len} + {emitted} emitted")
        last = req.prompt_len + req.max_new_tokens - 1
        if self._drafts:
            planned = min(planned, last)
        elif lower != planned:
            raise Violation("kv_length", f"{client.name}: {planned} planned, at least {lower}, and no drafts")
        most = known + self._device.depth - 1 + self._device.ahead.get((req.row, req.generation), 0)
        if lower > max(end, min(most, last)) or planned > pages * self._memory.page_size:
            text = f"{planned} planned, {known} known, prompt until {end}, {pages} pages, at most {last}"
            raise Violation("kv_length", f"{client.name}: {text}")

    def _check_ends(self, due: list[Client], now: float) -> None:
        """Who was to be ended has ended, and nobody outlives a limit of time."""
        for client in due:
            if client.ended is None:
                raise Violation("end_obeyed", f"{client.name} was to be ended before this step, and lives")
        for req in self._clients.live:
            client: Client = req.sink
            late = client.deadline is not None and client.deadline <= now
            # Limits strike at the start of a step: who was admitted in this one was in time or is late.
            stuck = not client.admissions and client.queue_deadline is not None and client.queue_deadline <= now
            if late or stuck:
                raise Violation("end_obeyed", f"{client.name} lives at {now:.2f}: {req}")


def check_pages(memory: RequestMemory) -> None:
    """Each page is free, or owned by one row, or owned by the cache, or leased: exactly one of the four."""
    allocator = memory.allocator
    free = allocator._stack[: allocator._top].tolist()
    owned = memory._pages[memory._owned].tolist()
    cached = np.flatnonzero(tree(memory.cache)._owned).tolist()
    leased = np.flatnonzero(memory.leases._coming).tolist()
    if sorted(free + owned + cached + leased) != list(range(1, allocator.num_pages + 1)):
        text = f"free {free}, owned by rows {owned}, cached {cached}, leased {leased}, of {allocator.num_pages}"
        raise Violation("page_owner", text)


def check_thoroughly(memory: RequestMemory) -> None:
    """Production's own integrity check; and each lock in the tree has a row that holds it, and the other way round."""
    memory.check_integrity()
    holders = Counter(id(node) for node in [*memory._nodes, *memory.leases.nodes] if node is not None)
    holds = {id(node): node.holds for root in tree(memory.cache)._roots.values() for node in root.below()}
    for node in holds:
        if holds[node] != holders.pop(node, 0):
            raise Violation("lock_holders", f"a cached prefix has {holds[node]} locks, and not as many holders")
    loose = [node for node in memory._nodes if node is not None and id(node) in holders]
    if any(not node.is_root for node in loose):
        raise Violation("lock_holders", "a row holds a prefix that is not in the tree")


def check_tenants(memory: RequestMemory, seats: list[Req]) -> None:
    """What a request holds of the cache lies in its own namespace."""
    for req in seats:
        root = list(memory._nodes[req.row].path())[-1]
        if root.salt != req.salt:
            raise Violation("tenant", f"{req.sink.name} of {req.salt!r} reads a prefix of {root.salt!r}")
