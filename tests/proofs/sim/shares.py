"""What takes part in a step: rows that could decode, at once or within a bound where steps do not mix; prompts too."""

from __future__ import annotations

from core.batch.schedule_batch import ScheduleBatch
from core.scheduler.scheduler import Scheduler
from core.types.request import Req
from tests.proofs.sim.scenario import Scenario
from tests.proofs.sim.story import Hits, Violation

LONGEST_WAIT = 4
"""Steps in a row of which a row that could decode is left out, where steps are not mixed."""


class Shares:
    """Looks at each plan from both sides of it."""

    def __init__(self, scenario: Scenario, scheduler: Scheduler, hits: Hits) -> None:
        self._running, self._hits = scheduler.running, hits
        # Where steps are long, every second one may be for those with little work.
        light = scenario.paced and len(scenario.weights) > 1
        self._longest = int(light) if scenario.config.mixed_chunk else LONGEST_WAIT
        self._ready: dict[tuple[Req, int], int] = {}
        self._prefilling: set[tuple[Req, int]] = set()
        self._waits: dict[tuple[Req, int], int] = {}
        self._passed_over: set[tuple[Req, int]] = set()

    def before_plan(self) -> None:
        """Rows that could take part."""
        seats = [(req, req.generation) for req in self._running.reqs if req is not None]
        planned, ends = self._running.planned, self._running.prefill_end
        self._prefilling = {seat for seat in seats if planned[seat[0].row] < ends[seat[0].row]}
        self._ready = {
            (req, generation): req.row
            for req, generation in seats
            if (req, generation) not in self._prefilling and planned[req.row] < req.prompt_len + req.max_new_tokens - 1
        }

    def after_plan(self, batch: ScheduleBatch | None) -> None:
        """Rows that did."""
        took = set() if batch is None else set(batch.rows.tolist())
        stayed = {seat: row for seat, row in self._ready.items() if seat[0].generation == seat[1]}
        self._waits = {seat: self._waits.get(seat, 0) + 1 for seat, row in stayed.items() if row not in took}
        for (req, _), waited in self._waits.items():
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
        again = {seat for seat in self._passed_over & self._prefilling if seat[0].generation == seat[1]}
        if again:
            raise Violation("prefill_share", f"{len(again)} prompts wait through two steps of decodes in a row")
        self._passed_over = self._prefilling
