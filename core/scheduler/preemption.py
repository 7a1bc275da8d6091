"""Which running requests give way to one that waits.

(1) Requests of its own tenant that are of a lower class (`priority` policy only). (2) Requests of tenants that hold
more.
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
"""Most requests that give way in one plan: what they compute again should not outweigh what the newcomer saves."""
MIN_TOKENS = 8
"""Tokens that a request which gave way must put out after it came back, before it may give way again."""

Reserve = Callable[[Req, Ints], int]
"""(newcomer, rows that are given back, int64[k]) -> pages to keep free for outputs."""


@dataclass(frozen=True, slots=True)
class Places:
    """Requests that give way, and the limit that `Lifecycle.admit` then needs as `at_most`.

    `at_most` is None where `losers` do not suffice; then more requests must give way in later plans.
    """

    losers: tuple[Req, ...] = ()
    at_most: int | None = None


NONE = Places()
"""No request gives way."""


class Preemption:
    """Chooses requests that give way; `PrefillAdder` moves them.

    Rules: (1) As few as will do, the last in line first, at most `MOST_PER_PLAN` in one plan. (2) A request that gave
    way is left alone until it has put out `MIN_TOKENS` tokens. (3) No request gives way where that would not help. The
    reasons within a tenant are in `core/decisions/0024-preemption-by-class.md`, between tenants in
    `core/decisions/0027-fair-share.md`.
    """

    def __init__(self, config: SchedulerConfig, lifecycle: Lifecycle, holdings: Holdings) -> None:
        self._lifecycle = lifecycle
        self._running = lifecycle.running
        self._policy = lifecycle.waiting.policy
        self._shares = lifecycle.shares
        self._holdings = holdings
        self._threshold = config.priority_preemption_threshold
        self.by_class = self._policy.classes and config.priority_preemption
        """Whether requests give way to those of a higher class."""
        self._left = 0
        """Requests that may still give way in this plan."""

    def begin(self) -> None:
        """A new plan begins: again `MOST_PER_PLAN` requests may give way."""
        self._left = MOST_PER_PLAN

    def might(self, tenant: Tenant) -> bool:
        """Whether `places` could find any for the first waiting request of `tenant`. Cheaper than `places`."""
        return self.by_class or self._holdings.could_gain(tenant)

    def places(self, newcomer: Req, reserve: Reserve, planned: Iterable[int]) -> Places:
        """Requests that give way so that `newcomer`, which was refused, fits; none where all that may would not do.

        Rows in `planned` are left alone: the plan in the making uses them already. `reserve(newcomer, leaving)`: pages
        to keep free once the owners of rows `leaving` are gone.
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
        """Requests of a lower class of the newcomer's tenant, the last in line first."""
        candidates = self._candidates(newcomer, rows)
        return self._fewest(heapq.nlargest(self._left, candidates, key=self._policy.key), newcomer, reserve)

    def _of_richer_tenants(self, newcomer: Req, rows: Ints, reserve: Reserve) -> Places:
        """Requests of tenants that hold more than the newcomer's.

        Where more must go than may in one plan, the first of them go now. What they held is kept for `newcomer`, since
        `Holdings.may_take_a_row` refuses richer tenants while `Tenant.refused` is set.
        """
        line = self._holdings.giving_way(newcomer, rows)
        found = self._fewest(line[: self._left], newcomer, reserve)
        if found.losers or len(line) <= self._left or self._cached_without(_rows(line), newcomer, reserve) is None:
            return found
        return Places(tuple(line[: self._left]))

    def _fewest(self, chosen: list[Req], newcomer: Req, reserve: Reserve) -> Places:
        """The fewest of `chosen`, from its first on, that suffice; `NONE` where all of them do not."""
        rows = _rows(chosen)
        if not chosen or self._cached_without(rows, newcomer, reserve) is None:
            return NONE
        for count in range(1, len(chosen) + 1):
            cached = self._cached_without(rows[:count], newcomer, reserve)
            if cached is not None:
                break
        # `cached` is not None: all of `chosen` suffice, as was asked first.
        return Places(tuple(chosen[:count]), cached or 0)

    def _cached_without(self, leaving: Ints, newcomer: Req, reserve: Reserve) -> int | None:
        return self._lifecycle.would_admit(newcomer, reserve(newcomer, leaving), leaving)

    def _candidates(self, newcomer: Req, rows: Ints) -> list[Req]:
        """Owners of `rows` that are of the newcomer's tenant, and of a class below by the threshold at least."""
        if self._shares.contended:
            rows = rows[self._shares.columns_of(rows) == self._shares.tenant(newcomer).column]
        rows = rows[self._running.priorities[rows] - newcomer.priority >= self._threshold]
        return self._running.owners(rows)

    def _movable(self, planned: Ints) -> Ints:
        """int64[n]: rows not in `planned` whose owners have something left to plan and may give way (again)."""
        running, rows = self._running, self._running.order
        if len(planned):
            rows = rows[~np.isin(rows, planned)]
        # A request that is planned to its end gives its row back by itself, a step or two from now. The maximum is for
        # embeddings: they put out nothing, so their `limit` is below their `prefill_end`.
        rows = rows[running.planned[rows] < np.maximum(running.prefill_end[rows], running.limit[rows])]
        return rows[running.has_advanced(rows, MIN_TOKENS)]


def _rows(reqs: list[Req]) -> Ints:
    return np.fromiter((req.row for req in reqs), np.int64, len(reqs))
