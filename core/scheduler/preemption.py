"""Which running requests give way to one that waits.

Those of a lower class of its own tenant (`priority` policy only), or those of tenants that hold more.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from core.config import SchedulerConfig
from core.scheduler.fair_share import Tenant
from core.scheduler.holdings import Holdings
from core.scheduler.lifecycle import Lifecycle
from core.types.arrays import Ints
from core.types.request import Req

MOST_PER_PLAN = 4
"""Requests that give way in one plan: what they must compute again should not outweigh what the newcomer saves."""
MIN_TOKENS = 8
"""Tokens that a request which gave way once must put out after it came back, before it may give way again."""

Reserve = Callable[[Req, Ints], int]


@dataclass(frozen=True, slots=True)
class Places:
    """Requests that give way, and what `Lifecycle.admit` then needs as `at_most`.

    None: these do not suffice, and more must follow in later plans.
    """

    losers: tuple[Req, ...] = ()
    at_most: int | None = None


NONE = Places()


class Preemption:
    """Chooses, and changes nothing. The rules and their reasons: `core/decisions/0024-preemption-by-class.md` within a
    tenant, `core/decisions/0027-fair-share.md` between tenants.
    """

    def __init__(self, config: SchedulerConfig, lifecycle: Lifecycle, holdings: Holdings) -> None:
        self._lifecycle = lifecycle
        self._running = lifecycle.running
        self._policy = lifecycle.waiting.policy
        self._shares = lifecycle.shares
        self._holdings = holdings
        self._threshold = config.priority_preemption_threshold
        self.by_class = self._policy.classes and config.priority_preemption
        self._left = 0

    def begin(self) -> None:
        """A new plan is made."""
        self._left = MOST_PER_PLAN

    def might(self, tenant: Tenant) -> bool:
        """Whether a look at the running requests is worth it for the first in line of `tenant`."""
        return self.by_class or self._holdings.could_gain(tenant)

    def places(self, newcomer: Req, reserve: Reserve, planned: Iterable[int]) -> Places:
        """Requests that give way so that `newcomer`, which does not fit, fits; as few as will do, and of no row in
        `planned`, which the plan that is made uses already.

        `reserve(newcomer, leaving)` gives the pages to keep free when the owners of rows `leaving` are gone. No
        request gives way where all that may would not help.
        """
        if self._left == 0:
            return NONE
        rows = self._movable(np.asarray(list(planned), np.int64))
        found = self._of_lower_class(newcomer, rows, reserve) if self.by_class else NONE
        if not found.losers and self._shares.contended and len(rows):
            found = self._of_richer_tenants(newcomer, rows, reserve)
        self._left -= len(found.losers)
        return found

    def _of_lower_class(self, newcomer: Req, rows: Ints, reserve: Reserve) -> Places:
        """Last in line first."""
        candidates = self._candidates(newcomer, rows)
        return self._fewest(heapq.nlargest(self._left, candidates, key=self._policy.key), newcomer, reserve)

    def _of_richer_tenants(self, newcomer: Req, rows: Ints, reserve: Reserve) -> Places:
        """Where more must go than may in one plan, the first of them go now: what they held is kept for `newcomer`."""
        line = self._holdings.giving_way(newcomer, rows)
        found = self._fewest(line[: self._left], newcomer, reserve)
        if found.losers or len(line) <= self._left or self._cached_without(_rows(line), newcomer, reserve) is None:
            return found
        return Places(tuple(line[: self._left]))

    def _fewest(self, chosen: list[Req], newcomer: Req, reserve: Reserve) -> Places:
        rows = _rows(chosen)
        if not chosen or self._cached_without(rows, newcomer, reserve) is None:
            return NONE
        for count in range(1, len(chosen) + 1):
            cached = self._cached_without(rows[:count], newcomer, reserve)
            if cached is not None:
                break
        return Places(tuple(chosen[:count]), cached or 0)

    def _cached_without(self, leaving: Ints, newcomer: Req, reserve: Reserve) -> int | None:
        return self._lifecycle.would_admit(newcomer, reserve(newcomer, leaving), leaving)

    def _candidates(self, newcomer: Req, rows: Ints) -> list[Req]:
        """Owners of `rows` that are of the same tenant and of a class far enough below."""
        if self._shares.contended:
            rows = rows[self._shares.columns_of(rows) == self._shares.tenant(newcomer).column]
        rows = rows[self._running.priorities[rows] - newcomer.priority >= self._threshold]
        return self._running.owners(rows)

    def _movable(self, planned: Ints) -> Ints:
        """int64[n]: rows whose owners have something left to plan and may be moved (again)."""
        running, rows = self._running, self._running.order
        if len(planned):
            rows = rows[~np.isin(rows, planned)]
        # What is planned to its end gives its row back by itself, a step or two from now.
        rows = rows[running.planned[rows] < np.maximum(running.prefill_end[rows], running.limit[rows])]
        return rows[running.has_advanced(rows, MIN_TOKENS)]


def _rows(reqs: list[Req]) -> Ints:
    return np.fromiter((req.row for req in reqs), np.int64, len(reqs))
