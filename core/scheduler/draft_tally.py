"""Counts what became of drafts, step by step, and makes a snapshot of it."""

from __future__ import annotations

import numpy as np

from core.batch.result import Accepted, StepResult
from core.histogram import ACCEPTANCE, Histogram
from core.types.arrays import Ints
from core.types.stats import DraftStats


class DraftTally:
    """Written by the loop thread only. A step costs a few operations on arrays, however many rows it has."""

    def __init__(self) -> None:
        self._steps = self._dropped = self._most = 0
        self._draft_seconds = self._verify_seconds = 0.0
        self._proposed: Ints = np.zeros(1, np.int64)
        self._right: Ints = np.zeros(1, np.int64)
        """At n: how often a row had n drafts in a step, and how often n of them were right."""
        self.lengths = Histogram(ACCEPTANCE)
        """Tokens of each row that had drafts in a step, the one behind the right drafts included."""

    def step_done(self, result: StepResult) -> None:
        """A result arrived."""
        self._draft_seconds += result.drafting
        self._most = 0
        accepted = result.accepted
        if accepted is None or not (had := accepted.proposed > 0).any():
            return
        self._steps += 1
        # What drafts were made behind the verdict is part of the step's time too.
        self._verify_seconds += max(0.0, result.busy - result.drafting)
        self._count(accepted.of(np.flatnonzero(had)))

    def _count(self, tried: Accepted) -> None:
        """Count the rows that had drafts."""
        self._most = int(tried.proposed.max())
        self._proposed = _added(self._proposed, np.bincount(tried.proposed))
        self._right = _added(self._right, np.bincount(tried.counts - 1))
        self.lengths.observe(tried.counts.astype(np.float64))

    def dropped(self, count: int) -> None:
        """`count` tokens of a step stood behind the end of their request."""
        self._dropped += count

    def stats(self) -> DraftStats:
        """An immutable copy."""
        return DraftStats(
            steps=self._steps,
            proposed=tuple(self._proposed.tolist()),
            right=tuple(self._right.tolist()),
            dropped=self._dropped,
            most=self._most,
            draft_seconds=self._draft_seconds,
            verify_seconds=self._verify_seconds,
        )


def _added(total: Ints, found: Ints) -> Ints:
    """The sums of two arrays, the shorter of which goes on with zeros."""
    sums: Ints = np.zeros(max(len(total), len(found)), np.int64)
    sums[: len(total)] = total
    sums[: len(found)] += found
    return sums
