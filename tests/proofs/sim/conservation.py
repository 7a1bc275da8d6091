"""Work is conserved: where there is something to compute and room to compute it, it is computed in this very step.

Three oracles. `overlap`: after a step of the scheduler as many steps are in flight as the executor takes, unless there
is nothing to plan. `left_out`: a plan holds every row that could decode, and every prompt as far as the budget goes.
`kept_waiting`: a request that fits a free row, with all that may still be put out, is admitted while there is budget.

Where steps are long (`Pace`), one step in flight is enough, and with several tenants every second plan may leave out
some of what it could hold.
"""

from __future__ import annotations

import numpy as np

from core.batch.schedule_batch import ScheduleBatch
from core.types.request import RequestState
from tests.proofs.sim.clients import Client
from tests.proofs.sim.family import Family, View
from tests.proofs.sim.story import Violation


def pages(tokens: int, page_size: int) -> int:
    """That hold so many tokens."""
    return -(-tokens // page_size)


class Conservation(Family):
    """Knows of pages and tokens only: what companion pools refuse is theirs to explain (`kept_waiting` leaves them)."""

    def __init__(self, view: View) -> None:
        super().__init__(view)
        scenario = view.scenario
        self._budget, self._mixed = scenario.config.prompt_tokens, scenario.config.mixed_chunk
        self._late = scenario.paced
        self._parted = scenario.paced and len(scenario.weights) > 1
        self._light = False
        """Whether the last plan left something out, as every second one may where steps are long."""
        self._plain = not (scenario.states or scenario.windows or scenario.cross)

    def planned(self, batch: ScheduleBatch | None) -> None:
        """See the module: `left_out` and, as far as the budget was not used up, `kept_waiting`."""
        if batch is None:
            return
        if self._leased():
            # What it may leave out is not known: the next one may leave out some again.
            self._light = False
            return
        rows, chunks = set(batch.rows.tolist()), batch.num_extend
        used = sum(batch.extend_lens[:chunks].tolist()) + sum(batch.encoder_lens.tolist())
        try:
            self._check_plan(batch, rows, chunks, used)
        except Violation:
            if self._light or not self._parted:
                raise
            self._light = True
            self.view.hits("light_step")
        else:
            self._light = False

    def _check_plan(self, batch: ScheduleBatch, rows: set[int], chunks: int, used: int) -> None:
        for client in self.view.seated():
            if client.req.row not in rows:
                self._check_left_out(client, batch.step_id, chunks, used)
        if used < self._budget and (self._mixed or chunks):
            self._check_waiting()

    def _check_left_out(self, client: Client, step: int, chunks: int, used: int) -> None:
        stay = client.admissions[-1]
        if stay.planned < stay.target:
            # A step of decodes alone may be owed to them; `shares` looks at how often.
            if used < self._budget and (self._mixed or chunks):
                text = f"step {step} uses {used} of {self._budget} tokens, and nothing of the prompt of {client.name}"
                raise Violation("left_out", text)
        elif stay.planned < client.last and (self._mixed or not chunks) and not self._waits_for_drafts(client.req.row):
            raise Violation("left_out", f"step {step} leaves out {client.name}, which could decode at {stay.planned}")

    def after_step(self) -> None:
        """See the module: `overlap` and `kept_waiting`."""
        device = self.view.device
        if self._leased() or self.view.scheduler.held:
            return
        if device.in_flight >= (1 if self._late else device.depth):
            return
        for client in self.view.seated():
            stay = client.admissions[-1]
            if stay.planned < max(stay.target, client.last) and not self._waits_for_drafts(client.req.row):
                text = f"{device.in_flight} of {device.depth} steps in flight, and {client.name} is planned only until"
                raise Violation("overlap", f"{text} {stay.planned} of {max(stay.target, client.last)}")
        self._check_waiting()

    def _leased(self) -> bool:
        """Whether pages are leased: then requests may wait for these, and `leased_page` and `wedged` look on."""
        return len(self.view.memory.leases) > 0

    def _waits_for_drafts(self, row: int) -> bool:
        """Whether the row lacks a page only if drafts that are in flight prove right: it waits for their result."""
        running, memory, rows = self.view.scheduler.running, self.view.memory, np.array([row])
        unsure = running.planned[row] > running.planned_lower[row]
        return bool(unsure and memory.needs_page(rows, running.planned[rows])[0])

    def _check_waiting(self) -> None:
        """Counts each page that is held once for all that hold it, and lets no request share or end early: what fits
        so fits however much an admission reserves for outputs.
        """
        view, size = self.view, self.view.scenario.page_size
        if not self._plain or not len(view.scheduler.waiting):
            return
        seats = list(view.seated())
        if len(seats) == view.scenario.rows:
            return
        waiting = [req for req in view.clients.live if req.state is RequestState.WAITING]
        held = sum(int(view.memory._count[client.req.row]) for client in seats)
        left = sum(client.req.max_new_tokens - len(client.tokens) for client in seats)
        needs = [
            pages(req.prompt_len + len(req.outputs), size)
            + pages(left + req.max_new_tokens - len(req.outputs), size)
            + held
            for req in waiting
        ]
        if needs and max(needs) <= view.scenario.pages:
            text = f"{len(seats)} of {view.scenario.rows} rows are taken, {held} of {view.scenario.pages} pages held"
            raise Violation("kept_waiting", f"{len(needs)} wait, each fits with {max(needs)} pages at most: {text}")
