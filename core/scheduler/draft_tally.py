"""Counts what became of drafts, step by step, and makes a snapshot of it."""

from __future__ import annotations

import numpy as np

from core.batch.result import Accepted, StepResult
from core.types.arrays import Ints
from core.types.stats import DraftStats


class DraftTally:
    """Written by the loop thread only. A step costs a few operations on arrays, however many rows it has."""

    def __init__(self) -> None:
        self._steps = self._dropped = self._most = 0
        self._draft_seconds = self._verify_seconds = 0.0
        self._proposed: Ints = np.zeros(1, np.int64)
        self._right: Ints = np.zeros(1, np.int64)
        """At n: how often a row had n drafts in a step, n above 0, and how often n of them were right."""
        self._stats: DraftStats | None = None
        """The last copy, as long as nothing has changed: most steps of text that repeats nothing are without drafts."""

    def step_done(self, result: StepResult) -> None:
        """A result arrived."""
        if result.accepted is None and not result.drafting and not self._most:
            return
        self._stats = None
        self._draft_seconds += result.drafting
        self._most = 0 if result.accepted is None else self._count(result.accepted)
        if self._most:
            self._steps += 1
            # What drafts were made behind the verdict is part of the step's time too.
            self._verify_seconds += max(0.0, result.busy - result.drafting)

    def _count(self, accepted: Accepted) -> int:
        """Count the rows that had drafts; returns the most that one had."""
        proposed = np.bincount(accepted.proposed)
        if len(proposed) < 2:
            return 0
        right = np.bincount(accepted.counts - 1)
        right[0] -= proposed[0]
        proposed[0] = 0
        self._proposed, self._right = _sum(self._proposed, proposed), _sum(self._right, right)
        return len(proposed) - 1

    def dropped(self, count: int) -> None:
        """`count` tokens of a step stood behind the end of their request."""
        if count:
            self._stats = None
            self._dropped += count

    def stats(self) -> DraftStats:
        """An immutable copy."""
        if self._stats is None:
            self._stats = DraftStats(
                steps=self._steps,
                proposed=tuple(self._proposed.tolist()),
                right=tuple(self._right.tolist()),
                dropped=self._dropped,
                most=self._most,
                draft_seconds=self._draft_seconds,
                verify_seconds=self._verify_seconds,
            )
        return self._stats


def _sum(total: Ints, found: Ints) -> Ints:
    """The sums of two arrays, the shorter of which goes on with zeros; one of the two is changed."""
    longer, shorter = (total, found) if len(total) >= len(found) else (found, total)
    longer[: len(shorter)] += shorter
    return longer
