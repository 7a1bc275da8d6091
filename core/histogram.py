"""Cumulative histograms with bounds from OpenTelemetry's GenAI conventions, and one traced example for each bucket."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from core.types.stats import Exemplar, HistogramStats

# gen_ai.server.request.duration, with a finer start. Its last bound hides a long tail, as 60 s did in vLLM (#15202), so
# whole requests get three doublings more.
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
REQUEST_SECONDS = (*SECONDS, 163.84, 327.68, 655.36)
# gen_ai.server.time_to_first_token, and four longer bounds for long queues.
FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0),
)
# gen_ai.server.time_per_output_token, with a finer start: small models take milliseconds.
TOKEN_SECONDS = (
    *(0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
    *(5.0, 10.0),
)
# gen_ai.client.token.usage, up to the longest contexts.
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576)
FEW = 16
"""Up to so many values are counted faster one by one than by numpy's calls."""
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


class Histogram:
    """Cumulative buckets, filled with whole arrays at a time or with one value. Written by one thread."""

    def __init__(self, bounds: tuple[float, ...] = SECONDS) -> None:
        self._bounds = bounds
        self._edges = np.asarray(bounds, np.float64)
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0
        self._exemplars: list[Exemplar | None] = []
        self._shown: HistogramStats | None = None

    def observe(self, values: npt.NDArray[np.float64]) -> None:
        """Add float64[n] observations."""
        if len(values) <= FEW:
            for value in values.tolist():
                self.observe_one(value)
            return
        places = np.searchsorted(self._edges, values, side="left")
        found = np.bincount(places, minlength=len(self._counts)).tolist()
        self._counts = [count + more for count, more in zip(self._counts, found)]
        self._total += float(values.sum())
        self._shown = None

    def observe_one(self, value: float, trace_id: str = "") -> None:
        """Add one observation; with a trace id it becomes the exemplar of its bucket."""
        place = bisect_left(self._bounds, value)
        self._counts[place] += 1
        self._total += value
        if trace_id:
            if not self._exemplars:
                self._exemplars = [None] * len(self._counts)
            self._exemplars[place] = Exemplar(trace_id, value)
        self._shown = None

    def stats(self) -> HistogramStats:
        """An immutable copy with cumulative counts, the same until something is added; the last bound is +Inf."""
        if self._shown is None:
            bounds = (*self._bounds, float("inf"))
            counts = tuple(accumulate(self._counts))
            self._shown = HistogramStats(bounds, counts, self._total, tuple(self._exemplars))
        return self._shown
