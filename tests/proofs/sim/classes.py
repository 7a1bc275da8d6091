"""What preemption by class may do, and must do, under the `priority` policy; told by its own books.

The rule in words: a request gives way to one whose priority value is lower by the threshold at least, when that one is
first in line and does not fit, and only if it fits then. The last in line gives way first, except for requests that
gave way before and have not put out `ADVANCE` tokens since they came back, and for those planned to their end.
"""

from __future__ import annotations

import math
from typing import Any

from core.batch.schedule_batch import ScheduleBatch
from core.models.lora.slots import LORA
from core.scheduler.scheduler import Scheduler
from core.types.request import Req
from tests.proofs.sim.scenario import Scenario
from tests.proofs.sim.story import Hits, Violation

ADVANCE = 8
PATIENCE = 3
"""Plans in a row after which a request may be first in line behind one that could give way: one whose budget went to a
higher class, one of decodes alone, one to spare.
"""


class Classes:
    """Listens to one scheduler's lifecycle."""

    def __init__(self, scenario: Scenario, scheduler: Scheduler, hits: Hits) -> None:
        config = scenario.config
        self._scheduler, self._hits = scheduler, hits
        self._memory, self._running = scheduler.memory, scheduler.running
        self._threshold = config.priority_preemption_threshold
        self._enabled = config.policy == "priority" and config.priority_preemption
        self._plain = all(each.name == LORA for each in scheduler.memory.companions)
        self._one_tenant = len(scenario.weights) == 1
        self._starts: dict[Req, int] = {}
        """Of those who run: the tokens they came (back) with."""
        self._moved: set[Req] = set()
        self._losers: list[Req] = []
        """Clients that gave way for a request that is not seated yet."""
        self._waits: tuple[Req | None, int] = (None, 0)
        self._listen(scheduler._lifecycle)

    def _listen(self, lifecycle: Any) -> None:
        admit, retract, preempt = lifecycle.admit, lifecycle.retract, lifecycle.preempt

        def admitted(req: Req, *args: Any, **kwargs: Any) -> bool:
            tokens = req.prompt_len + len(req.outputs)
            seated: bool = admit(req, *args, **kwargs)
            if seated:
                self._starts[req] = tokens
            self._settle(req, seated)
            return seated

        def retracted(req: Req, *, keep: bool = True) -> None:
            self._moved.add(req)
            retract(req, keep=keep)

        def preempted(req: Req, newcomer: Req) -> None:
            if req.tenant == newcomer.tenant:
                self._may(req)
                req.sink.by_class += 1
                self._hits("class_preemption")
            preempt(req, newcomer)

        lifecycle.admit, lifecycle.retract, lifecycle.preempt = admitted, retracted, preempted

    def _may(self, req: Req) -> None:
        name, first = req.sink.name, self._first(req.tenant)
        if not self._enabled or first is None or req.priority - first.priority < self._threshold:
            raise Violation(
                "class", f"{name} of priority {req.priority} gives way, but no request of a higher class waits"
            )
        if not self._movable(req):
            raise Violation("restless", f"{name} gives way again, and has not put out {ADVANCE} tokens since")
        if self._plain and self._surely_fits(first):
            raise Violation("in_vain", f"{name} gives way to {first.sink.name}, which fits without that")
        own = [other for other in self._seats() if other.tenant == req.tenant]
        others = [other for other in own if other.priority - first.priority >= self._threshold]
        if any(_key(other) > _key(req) and self._movable(other) for other in others):
            raise Violation("class", f"{name} gives way, and one behind it does not")
        self._losers.append(req)

    def _settle(self, req: Req, seated: bool) -> None:
        """After every attempt to admit: what gave way did it for this one, which may still wait for leased pages."""
        losers, self._losers = self._losers, []
        if not seated and self._memory.leases.coming:
            return
        for loser in losers:
            if not seated or req.priority > loser.priority - self._threshold:
                raise Violation("in_vain", f"{loser.sink.name} gave way, and {req.sink.name} has not got its place")

    def after_plan(self, batch: ScheduleBatch | None) -> None:
        """No request gave way in vain; the first in line does not wait behind one that could give way."""
        if self._losers:
            raise Violation("in_vain", f"{self._losers[0].sink.name} gave way, and no request came")
        if batch is None or not (self._enabled and self._plain and self._one_tenant):
            return
        first, (before, plans) = self._first(""), self._waits
        if first is None or not self._one_row_would_do(first):
            self._waits = None, 0
            return
        plans = plans + 1 if before is first else 1
        if plans > PATIENCE:
            raise Violation("inversion", f"{first.sink.name} waits {plans} plans behind requests of a lower class")
        self._waits = first, plans

    def _one_row_would_do(self, first: Req) -> bool:
        """The last in line of a lower class could make room alone, and no other prompt has precedence."""
        seats = self._seats()
        lower = [req for req in seats if req.priority - first.priority >= self._threshold and self._movable(req)]
        busy = [req for req in seats if req.priority <= first.priority and self._planned(req) < self._starts[req]]
        if busy or not lower:
            return False
        loser = max(lower, key=_key)
        return self._pages_suffice(first, int(self._memory._owned[loser.row].sum()))

    def _surely_fits(self, req: Req) -> bool:
        return self._memory.rows.available > 0 and self._pages_suffice(req)

    def _pages_suffice(self, req: Req, coming: int = 0) -> bool:
        """Even if none of its prefix were cached, and the reserve were held for everybody; `coming` pages are freed."""
        adder, size = self._scheduler._planner._adder, self._memory.page_size
        left = sum(max(0, other.prompt_len + other.max_new_tokens - self._known(other)) for other in self._seats())
        reserve = math.ceil((left + req.max_new_tokens) * adder._reserve_share / size)
        tokens = req.prompt_len + len(req.outputs)
        return -(-tokens // size) + reserve <= self._memory.obtainable_pages + coming

    def _movable(self, req: Req) -> bool:
        end = max(self._starts[req], req.prompt_len + req.max_new_tokens - 1)
        advanced = self._known(req) - self._starts[req] >= ADVANCE
        return self._planned(req) < end and (req not in self._moved or advanced)

    def _first(self, tenant: str) -> Req | None:
        waiting = (req for req in self._scheduler.waiting.members() if req.tenant == tenant)
        return min(waiting, key=_key, default=None)

    def _seats(self) -> list[Req]:
        return [req for req in self._running.reqs if req is not None]

    def _known(self, req: Req) -> int:
        return int(self._running.known[req.row])

    def _planned(self, req: Req) -> int:
        return int(self._running.planned[req.row])


def _key(req: Req) -> tuple[int, int]:
    return req.priority, req.sequence
