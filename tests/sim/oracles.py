"""What must hold after every step of the scheduler, whatever happened in it.

Written against the structures, not through the methods that keep them: an accountant does not ask the cashier. The cheap
checks run after every step; the ones that walk the radix tree run after some, and when everybody has left.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from core.memory.request_memory import RequestMemory
from core.prefix.base import PrefixCache
from core.scheduler.scheduler import Scheduler
from core.types.request import Req, RequestState
from tests.sim.clients import Client, Clients
from tests.sim.device import SimExecutor
from tests.sim.scenario import Scenario
from tests.sim.story import Violation

THOROUGH_EVERY = 16
MAX_IDLE_RETRACTIONS = 1
"""How often one request may give way while nobody gets a token or ends: it must not be preempted for ever."""


class Oracles:
    """Looks at one scheduler, its memory, its device and its clients."""

    def __init__(self, scenario: Scenario, scheduler: Scheduler, device: SimExecutor, clients: Clients) -> None:
        self._scenario = scenario
        self._scheduler = scheduler
        self._memory = scheduler.memory
        self._device = device
        self._clients = clients
        self._looks = 0
        self._preemptions = 0

    def after_step(self, moved: bool) -> None:
        """Everything cheap; every sixteenth time everything."""
        check_pages(self._memory)
        self._check_states()
        self._check_bounds()
        self._check_progress(moved)
        self._looks += 1
        if self._looks % THOROUGH_EVERY == 0:
            check_thoroughly(self._memory)

    def when_empty(self) -> None:
        """Nobody is left: every row and page is free or cached, and nothing is locked."""
        memory = self._memory
        check_pages(memory)
        check_thoroughly(memory)
        if memory.rows.used or memory.owned_pages() or memory.cache.locked_pages:
            text = f"{memory.rows.used} rows, {memory.owned_pages()} pages, {memory.cache.locked_pages} locked"
            raise Violation("leak", f"everybody left, but {text} are still held")
        used = {pool.name: pool.used for pool in memory.stats()}
        if any(used.values()):
            raise Violation("leak", f"everybody left, but the pools say {used}")

    def _check_states(self) -> None:
        """Each live request is in exactly one place, and knows it; a row has one owner, and no two requests a row."""
        scheduler, live = self._scheduler, self._clients.live
        waiting, rows = scheduler.waiting, self._memory.rows
        seats = [req for req in scheduler.running.reqs if req is not None]
        places = len(waiting) + len(seats) + len(scheduler.intake.members())
        if places != len(live) or len(scheduler.running) != len(seats) or rows.used != len(seats):
            text = f"{len(live)} live: {len(waiting)} wait, {len(seats)} run ({rows.used} rows held), {places} in all"
            raise Violation("one_place", text)
        generations = rows.generations.tolist()
        known, planned = scheduler.running.known.tolist(), scheduler.running.planned.tolist()
        ends, counts = scheduler.running.prefill_end.tolist(), self._memory._count.tolist()
        for req in seats:
            row = req.row
            if req not in live or req.state is not RequestState.RUNNING or req in waiting:
                raise Violation("one_place", f"row {row} is taken by a request that is {req.state.value}")
            if scheduler.running.reqs[row] is not req or generations[row] != req.generation or row < 1:
                raise Violation("one_owner", f"request of row {row} generation {req.generation}: not the owner")
            self._check_lengths(req, known[row], planned[row], ends[row], counts[row])
        for req in live:
            if (req.state is RequestState.RUNNING) != (req.row > 0) or req.state is RequestState.FINISHED:
                raise Violation("one_place", f"live request is {req.state.value} with row {req.row}")

    def _check_lengths(self, req: Req, known: int, planned: int, end: int, pages: int) -> None:
        """KV length == prompt + emitted, as the plan claims, and the pages that it takes are there."""
        client: Client = req.sink
        emitted = len(client.tokens)
        if known != req.prompt_len + emitted:
            raise Violation("kv_length", f"{client.name}: {known} known, prompt {req.prompt_len} + {emitted} emitted")
        last = req.prompt_len + req.max_new_tokens - 1
        if planned > max(end, min(known + self._device.depth - 1, last)) or planned > pages * self._memory.page_size:
            text = f"{planned} planned, {known} known, prompt until {end}, {pages} pages, at most {last}"
            raise Violation("kv_length", f"{client.name}: {text}")

    def _check_bounds(self) -> None:
        """Queues and depth."""
        scheduler = self._scheduler
        if self._device.in_flight > self._device.depth:
            raise Violation("executor_depth", f"{self._device.in_flight} steps in flight")
        # A retracted request goes back into the queue whether it is full or not.
        bound = self._scenario.config.max_queued_requests + self._memory.rows.size
        if len(scheduler.waiting) + len(scheduler.intake.members()) > bound:
            raise Violation("queue_bound", f"{len(scheduler.waiting)} wait, at most {bound} may")

    def _check_progress(self, moved: bool) -> None:
        """The scheduler never sits still before a queue, and gives nobody's pages away in vain for ever."""
        scheduler = self._scheduler
        if not moved and len(scheduler.waiting) and not self._device.in_flight:
            raise Violation("wedged", f"{len(scheduler.waiting)} wait, {len(scheduler.running)} run, nothing is planned")
        if scheduler.recorder.preemptions == self._preemptions:
            return
        self._preemptions = scheduler.recorder.preemptions
        for req, client in self._clients.live.items():
            own = req.retractions - client.forced
            if own > client.gave_way:
                self._check_preempted(client)
                client.gave_way = own

    def _check_preempted(self, client: Client) -> None:
        progress = self._clients.progress
        client.in_vain = client.in_vain + 1 if client.retracted_at == progress else 0
        client.retracted_at = progress
        if client.in_vain > MAX_IDLE_RETRACTIONS:
            raise Violation("preempted_for_ever", f"{client.name} gave way {client.in_vain} times, nobody got anything")


def check_pages(memory: RequestMemory) -> None:
    """Each page is free, or owned by one row, or owned by the cache: exactly one of the three."""
    allocator = memory.allocator
    pages = allocator.num_pages + 1
    free = np.bincount(allocator._stack[: allocator._top], minlength=pages)
    owned = np.bincount(memory._pages[memory._owned], minlength=pages)
    cached = _tree(memory.cache)._owned[:pages]
    owners = free + owned
    owners[: len(cached)] += cached
    owners[0] += 1
    if (owners != 1).any() or free[0]:
        off = {page: (int(free[page]), int(owned[page])) for page in np.flatnonzero(owners != 1).tolist()}
        raise Violation("page_owner", f"pages with no owner or several: {off} (times free, times owned by a row)")


def check_thoroughly(memory: RequestMemory) -> None:
    """Production's own integrity check, and: every lock in the tree is held by a row, every row's node is in the tree."""
    memory.check_integrity()
    holders = Counter(id(node) for node in memory._nodes if node is not None)
    holds = {id(node): node.holds for root in _tree(memory.cache)._roots.values() for node in root.below()}
    for node in holds:
        if holds[node] != holders.pop(node, 0):
            raise Violation("lock_holders", f"a cached prefix has {holds[node]} locks, which is not the rows that hold it")
    loose = [node for node in memory._nodes if node is not None and id(node) in holders]
    if any(not node.is_root for node in loose):
        raise Violation("lock_holders", "a row holds a prefix that is not in the tree")


def _tree(cache: PrefixCache) -> Any:
    """The radix tree inside either cache."""
    return getattr(cache, "_groups", cache)
