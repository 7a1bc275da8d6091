"""What takes part in a step: rows that could decode, at once or within a bound where steps do not mix; prompts too."""

from __future__ import annotations

import numpy as np

from core.batch.schedule_batch import ScheduleBatch
from core.scheduler.scheduler import Scheduler
from core.types.request import Req
from tests.proofs.sim.scenario import Scenario
from tests.proofs.sim.story import Hits, Violation

Seat = tuple[Req, int, int]
"""A request, and the row and generation that it runs as."""

LONGEST_WAIT = 4
"""Steps in a row of which a row that could decode is left out, where steps are not mixed."""


class Shares:
    """Looks at each plan from both sides of it."""

    def __init__(self, scenario: Scenario, scheduler: Scheduler, hits: Hits) -> None:
        self._running, self._memory, self._hits = scheduler.running, scheduler.memory, hits
        # Where steps are long, every second one may be for those with little work.
        light = scenario.paced and len(scenario.weights) > 1
        self._longest = int(light) if scenario.config.mixed_chunk else LONGEST_WAIT
        self._ready: set[Seat] = set()
        self._prefilling: set[Seat] = set()
        self._waits: dict[Seat, int] = {}
        self._passed_over: set[Seat] = set()

    def before_plan(self) -> None:
        """Rows that could take part."""
        seats = [(req, req.row, req.generation) for req in self._running.reqs if req is not None]
        planned, ends = self._running.planned, self._running.prefill_end
        self._prefilling = {(req, row, _) for req, row, _ in seats if planned[row] < ends[row]}
        self._ready = {
            (req, row, _)
            for req, row, _ in seats
            if ends[row] <= planned[row] < req.prompt_len + req.max_new_tokens - 1 and not self._waits_for_drafts(row)
        }

    def _waits_for_drafts(self, row: int) -> bool:
        """Whether the row lacks a page only if drafts that are in flight prove right."""
        planned, rows = self._running.planned, np.array([row])
        unsure = planned[row] > self._running.planned_lower[row]
        return bool(unsure and self._memory.needs_page(rows, planned[rows])[0])

    def after_plan(self, batch: ScheduleBatch | None) -> None:
        """Rows that did."""
        if len(self._memory.leases):
            # Rows may wait for leased pages.
            self._waits = {}
            return
        took = set() if batch is None else set(batch.rows.tolist())
        self._waits = {
            seat: self._waits.get(seat, 0) + 1 for seat in self._ready if _stayed(seat) and seat[1] not in took
        }
        for (req, *_), waited in self._waits.items():
            if waited > self._longest:
                raise Violation("decode_share", f"{req.sink.name} could decode and is left out of {waited} steps")
            if waited == LONGEST_WAIT:
                self._hits("decode_owed")
        self._check_prefills(batch)

    def _check_prefills(self, batch: ScheduleBatch | None) -> None:
        """After a step of decodes alone, prompts that it made wait go on, unless they had to give way."""
        if batch is None or batch.num_extend:
            self._passed_over = set()
            return
        again = {seat for seat in self._passed_over & self._prefilling if _stayed(seat)}
        if again:
            raise Violation("prefill_share", f"{len(again)} prompts wait through two steps of decodes in a row")
        self._passed_over = self._prefilling


def _stayed(seat: Seat) -> bool:
    """Whether it has kept its row. Another row may have reached the same generation."""
    req, *owner = seat
    return [req.row, req.generation] == owner
