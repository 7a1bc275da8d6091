"""Deals the rows that decode out among the steps of a pipeline, so that each of its ranks has some to compute.

A row decodes in every N-th step where there are N ranks: its next input is sampled once the step before has been
through all of them. No row belongs to a group: each step takes an N-th of the rows, those first that were planned
longest ago. So steps stay equal when requests end or come, which peers' fixed micro-batches do not.
"""

from __future__ import annotations

import math

import numpy as np

from core.types.arrays import Ints


class Microbatches:
    """Of `stages` ranks; with one of them every step takes all rows."""

    def __init__(self, stages: int, num_rows: int) -> None:
        self._stages = stages
        self._latest: Ints = np.full(num_rows, -stages, np.int64)
        """By row: the last step that was planned with it."""

    def due(self, rows: Ints, step: int, in_flight: int) -> Ints:
        """Which of `rows`, int64[n], decode in step `step`, in their order; `in_flight`: steps that are not done.

        Where all of them are away none is due, unless there would be room in an engine of one rank too: with fewer rows
        than ranks a step waits for the one before.
        """
        if self._stages == 1 or not len(rows):
            return rows
        latest = self._latest[rows]
        ready = latest <= step - self._stages
        if not ready.any():
            if in_flight >= 2:
                return rows[:0]
            ready = latest == latest.min()
        most = math.ceil(len(rows) / self._stages)
        if np.count_nonzero(ready) > most:
            places = np.flatnonzero(ready)
            chosen = places[np.argsort(latest[places], kind="stable")[:most]]
            ready = np.zeros_like(ready)
            ready[chosen] = True
        due: Ints = rows[ready]
        return due

    def planned(self, rows: Ints, step: int) -> None:
        """Note that `rows`, int64[n], are in step `step`."""
        self._latest[rows] = step
