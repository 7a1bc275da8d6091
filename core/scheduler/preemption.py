"""Which running requests give way to one that waits and is of a higher class (`priority` policy only)."""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np

from core.config import SchedulerConfig
from core.scheduler.lifecycle import Lifecycle
from core.types.arrays import Ints
from core.types.request import Req

MOST_PER_PLAN = 4
"""Requests that give way in one plan: what they must compute again should not outweigh what the newcomer saves."""
MIN_TOKENS = 8
"""Tokens that a request which gave way once must put out after it came back, before it may give way by class again."""

Reserve = Callable[[Req, Ints], int]


class Preemption:
    """Chooses, and changes nothing. The rule and its reasons: `core/decisions/0024-preemption-by-class.md`."""

    def __init__(self, config: SchedulerConfig, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle
        self._running = lifecycle.running
        self._policy = lifecycle.waiting.policy
        self._threshold = config.priority_preemption_threshold
        self.enabled = self._policy.classes and config.priority_preemption
        self._left = 0

    def begin(self) -> None:
        """A new plan is made."""
        self._left = MOST_PER_PLAN

    def losers(self, newcomer: Req, reserve: Reserve) -> tuple[list[Req], int]:
        """Requests that give way so that `newcomer`, which does not fit, fits; last in line first, as few as will do.

        `reserve(newcomer, leaving)` gives the pages to keep free when the owners of rows `leaving` are gone. With the
        requests comes what `Lifecycle.admit` needs as `at_most`. An empty list, where that would not help.
        """
        if not self.enabled or self._left == 0:
            return [], 0
        chosen = heapq.nlargest(self._left, self._candidates(newcomer), key=self._policy.key)
        rows = np.fromiter((req.row for req in chosen), np.int64, len(chosen))

        if not chosen or self._cached_without(rows, newcomer, reserve) is None:
            return [], 0
        for count in range(1, len(chosen) + 1):
            cached = self._cached_without(rows[:count], newcomer, reserve)
            if cached is not None:
                break
        self._left -= count
        return chosen[:count], cached or 0

    def _cached_without(self, leaving: Ints, newcomer: Req, reserve: Reserve) -> int | None:
        return self._lifecycle.would_admit(newcomer, reserve(newcomer, leaving), leaving)

    def _candidates(self, newcomer: Req) -> list[Req]:
        """Running requests of a class far enough below, which have something left to plan and may be moved (again)."""
        running, rows = self._running, self._running.order
        rows = rows[running.priorities[rows] - newcomer.priority >= self._threshold]
        # What is planned to its end gives its row back by itself, a step or two from now.
        rows = rows[running.planned[rows] < np.maximum(running.prefill_end[rows], running.limit[rows])]
        if len(rows) == 0:
            return []
        advanced = (running.known[rows] - running.prefill_end[rows] >= MIN_TOKENS).tolist()
        owners = zip(running.owners(rows), advanced, strict=True)
        return [req for req, moved_on in owners if moved_on or req.retractions == 0]
