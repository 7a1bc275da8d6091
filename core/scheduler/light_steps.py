"""Light steps: only for tenants with little work, so that their first tokens need not wait for other tenants' work.

A step takes as long as everything in it. Where steps are long (`Pace`), a prompt of 12 tokens in a step beside 256
decoding rows of another tenant gets its first token after the work of all of them. A step of its own takes a tenth of
that. The other tenants wait that long, before every second step at most.
"""

from __future__ import annotations

import numpy as np

from core.scheduler.fair_share import FairShare, Tenant
from core.scheduler.running import RunningSet
from core.scheduler.waiting_queue import WaitingQueue
from core.types.arrays import Ints

PART = 4
"""A tenant has little work if it asks for at most 1 / PART of an equal share of the tokens that all tenants ask for."""
FEW = 4
"""Most waiting requests of a tenant whose tokens are counted; with more it counts as asking for a whole step."""


class LightSteps:
    """Chooses the tenants that the next step is for. Costs a pass over arrays by row, and only where it is asked."""

    def __init__(self, shares: FairShare, running: RunningSet, waiting: WaitingQueue, budget: int) -> None:
        self._shares = shares
        self._running = running
        self._waiting = waiting
        self._budget = budget
        self._was_light = False

    def tenants(self) -> list[Tenant] | None:
        """The tenants with little work, if one of them has a prompt; None if the step is for all tenants.

        The step after a light one is always for all.
        """
        self._was_light = not self._was_light and bool(chosen := self._light())
        return chosen if self._was_light else None

    def abandoned(self) -> None:
        """The light step just chosen held nothing that could be planned, so the next one may be light again."""
        self._was_light = False

    def rows_of(self, tenants: list[Tenant], rows: Ints) -> Ints:
        """Those of `rows`, int64[n], whose owners are of `tenants`."""
        return rows[np.isin(self._shares.columns_of(rows), [tenant.column for tenant in tenants])]

    def _light(self) -> list[Tenant]:
        prompts, outputs = self._asked()
        total = float((prompts.clip(max=self._budget) + outputs).sum())
        most = total / (PART * len(list(self._shares)))
        light = [tenant for tenant in self._shares if prompts[tenant.column] + outputs[tenant.column] <= most]
        return light if any(prompts[tenant.column] for tenant in light) else []

    def _asked(self) -> tuple[Ints, Ints]:
        """int64[capacity] each, by column of tenant: prompt tokens still to be computed, and rows that decode."""
        count, running = self._shares.capacity, self._running
        rows = running.prefilling()
        left = running.prefill_end[rows] - running.planned[rows]
        prompts = np.bincount(self._shares.columns_of(rows), weights=left, minlength=count).astype(np.int64)
        outputs = np.bincount(self._shares.columns_of(running.decoding()), minlength=count)
        for tenant in self._shares:
            if tenant.waits:
                few = self._waiting.waiting_of(tenant.name) <= FEW
                prompts[tenant.column] += self._waiting.tokens_of(tenant.name) if few else self._budget
        return prompts, outputs
