"""Counters and histograms of the engine, gathered per step in bulk, published as one immutable `EngineStats`."""

from __future__ import annotations

from collections import Counter

import numpy as np

from core import invariants
from core.batch.result import StepResult
from core.device.checks import DEVICE_CHECKS
from core.memory.request_memory import RequestMemory
from core.types.request import Req
from core.types.stats import EngineStats, HistogramStats

# From OpenTelemetry's GenAI conventions, with a finer start: small models and cache hits answer in milliseconds.
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
HISTOGRAMS = (
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "queue_time_seconds",
    "e2e_request_latency_seconds",
    "embedding_latency_seconds",
)
IDLE_WINDOW = 0.98
"""Weight of the past in the idle ratio: about the last 50 steps."""


class Histogram:
    """Cumulative buckets, filled with whole arrays at a time."""

    def __init__(self, bounds: tuple[float, ...] = SECONDS) -> None:
        self._bounds = np.asarray(bounds)
        self._counts = np.zeros(len(bounds) + 1, np.int64)
        self._total = 0.0

    def observe(self, values: np.ndarray) -> None:
        """Add float64[n] observations."""
        places = np.searchsorted(self._bounds, values, side="left")
        self._counts += np.bincount(places, minlength=len(self._counts))
        self._total += float(values.sum())

    def stats(self) -> HistogramStats:
        """An immutable copy with cumulative counts; the last bound is +Inf."""
        bounds = (*self._bounds.tolist(), float("inf"))
        return HistogramStats(bounds, tuple(np.cumsum(self._counts).tolist()), self._total)


class StatsRecorder:
    """Written by the loop thread only; `publish` makes what other threads may read."""

    def __init__(self) -> None:
        self.preemptions = 0
        self.recomputed_tokens = 0
        self.finished: Counter[str] = Counter({"stop": 0, "length": 0, "cancelled": 0})
        self._prompt_tokens = self._cached_tokens = self._generation_tokens = 0
        self._stale_results = 0
        self._step = 0
        self._busy = self._idle = 0.0
        self._last_step_at = 0.0
        self._device_counts = np.zeros(len(DEVICE_CHECKS), np.int64)
        self._histograms = {name: Histogram() for name in HISTOGRAMS}

    def scheduled(self, req: Req, now: float) -> None:
        """A request got its row for the first time."""
        self._prompt_tokens += req.input_len
        self._cached_tokens += req.cached_tokens
        self._histograms["queue_time_seconds"].observe(np.array([now - req.arrived_at]))

    def step_done(self, result: StepResult, stale: int) -> None:
        """One result arrived, `stale` of whose tokens were for former owners."""
        self._step = result.step_id
        self._stale_results += stale
        self._busy = self._busy * IDLE_WINDOW + result.busy
        self._idle = self._idle * IDLE_WINDOW + result.idle
        if len(result.assert_counts):
            self._device_counts = result.assert_counts

    def tokens(self, reqs: list[Req], positions: np.ndarray, gaps: np.ndarray, now: float) -> None:
        """New tokens of one step: int64[n] output positions, float64[n] seconds since the row's token before."""
        self._generation_tokens += len(reqs)
        self._last_step_at = now
        later = positions > 0
        if later.any():
            self._histograms["inter_token_latency_seconds"].observe(gaps[later])
        for i in np.flatnonzero(~later).tolist():
            reqs[i].first_token_at = now
            self._histograms["time_to_first_token_seconds"].observe(np.array([now - reqs[i].arrived_at]))

    def embedded(self, req: Req, now: float) -> None:
        """The vector of an embedding is there."""
        self._histograms["embedding_latency_seconds"].observe(np.array([now - req.arrived_at]))

    def ended(self, req: Req, reason: str, now: float) -> None:
        """A terminal left the scheduler."""
        self.finished[reason] += 1
        self._histograms["e2e_request_latency_seconds"].observe(np.array([now - req.arrived_at]))

    def assert_failures(self) -> dict[str, int]:
        """Violations by check name, host and device, every name present."""
        device = dict(zip(DEVICE_CHECKS, self._device_counts.tolist(), strict=True))
        return {**invariants.FAILURES, **device}

    def publish(self, memory: RequestMemory, running: int, waiting: int) -> EngineStats:
        """The snapshot after this step."""
        elapsed = self._busy + self._idle
        return EngineStats(
            step=self._step,
            pools=memory.stats(),
            running=running,
            waiting=waiting,
            page_size=memory.page_size,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            generation_tokens=self._generation_tokens,
            preemptions=self.preemptions,
            recomputed_tokens=self.recomputed_tokens,
            stale_results=self._stale_results,
            device_idle_ratio=self._idle / elapsed if elapsed else 0.0,
            last_step_at=self._last_step_at,
            finished=dict(self.finished),
            assert_failures=self.assert_failures(),
            histograms={name: histogram.stats() for name, histogram in self._histograms.items()},
        )
