"""Counters and histograms of the engine, gathered per step in bulk, published as one immutable `EngineStats`."""

from __future__ import annotations

from collections import Counter

import numpy as np

from core import invariants
from core.batch.result import StepResult
from core.batch.schedule_batch import ScheduleBatch
from core.device.checks import DEVICE_CHECKS
from core.histogram import (
    FIRST_TOKEN_SECONDS,
    REQUEST_SECONDS,
    ROWS,
    SECONDS,
    TOKEN_SECONDS,
    TOKENS,
    Histogram,
)
from core.memory.request_memory import RequestMemory
from core.scheduler.draft_tally import DraftTally
from core.scheduler.host_cache import HostCache, HostCacheStats
from core.scheduler.phases import PhaseClock
from core.types.request import Req
from core.types.stats import EngineStats

HISTOGRAMS = {
    "time_to_first_token_seconds": FIRST_TOKEN_SECONDS,
    "inter_token_latency_seconds": TOKEN_SECONDS,
    "request_time_per_output_token_seconds": TOKEN_SECONDS,
    "queue_time_seconds": SECONDS,
    "request_prefill_time_seconds": SECONDS,
    "request_decode_time_seconds": REQUEST_SECONDS,
    "e2e_request_latency_seconds": REQUEST_SECONDS,
    "embedding_latency_seconds": SECONDS,
    "request_prompt_tokens": TOKENS,
    "request_generation_tokens": TOKENS,
    "step_duration_seconds": SECONDS,
    "step_tokens": TOKENS,
    "step_requests": ROWS,
}
"""Bucket bounds of each histogram, by its name."""

IDLE_WINDOW = 0.98
"""Factor by which older steps count less with each step in the idle ratio: about the last 50 steps count."""


class Tally:
    """Written by the loop thread only; `publish` makes the snapshot that other threads may read.

    `now` is in seconds of the loop's clock everywhere.
    """

    def __init__(self, phases: PhaseClock, *, speculates: bool = False, prompt_tokens: int = 0) -> None:
        """`speculates`: whether steps may verify drafts; `prompt_tokens`: the most that one step computes."""
        self._most_prompt_tokens = prompt_tokens
        self._phases = phases
        self._drafts = DraftTally() if speculates else None
        self.host_cache: HostCache | None = None
        """Set by the scheduler where host memory keeps something."""
        self.preemptions = 0
        self.priority_preemptions = 0
        self.share_preemptions = 0
        self.restart_preemptions = 0
        self.recomputed_tokens = 0
        self.finished: Counter[str] = Counter({"stop": 0, "length": 0, "cancelled": 0})
        self._prompt_tokens = self._cached_tokens = self._generation_tokens = 0
        self._stale_results = 0
        self._split_steps = 0
        self._step = 0
        self._busy = self._idle = 0.0
        self._busy_sum = self._idle_sum = 0.0
        self._prefilled = self._decoded = 0
        self._last_step_at = 0.0
        self._device_counts = np.zeros(len(DEVICE_CHECKS), np.int64)
        self._histograms = {name: Histogram(bounds) for name, bounds in HISTOGRAMS.items()}

    @property
    def step(self) -> int:
        """Number of the newest step whose result has arrived."""
        return self._step

    def scheduled(self, req: Req, now: float) -> None:
        """`req` got a row for the first time."""
        self._prompt_tokens += req.input_len
        self._cached_tokens += req.cached_tokens
        self._histograms["queue_time_seconds"].observe_one(now - req.arrived_at, req.trace_id)
        self._histograms["request_prompt_tokens"].observe_one(req.input_len)

    def submitted(self, batch: ScheduleBatch) -> int:
        """A step was submitted. Returns the number of tokens that it computes at most."""
        tokens = batch.num_tokens
        prefilled = int(batch.extend_lens[: batch.num_extend].sum()) if batch.num_extend else 0
        self._prefilled += prefilled
        # The drafts that may be verified are among them.
        self._decoded += tokens - prefilled
        self._histograms["step_tokens"].observe_one(tokens)
        self._histograms["step_requests"].observe_one(len(batch.rows))
        return tokens

    def step_done(self, result: StepResult, stale: int) -> None:
        """A result arrived; `stale` of its tokens were for former owners of their rows."""
        self._step = result.step_id
        self._stale_results += stale
        self._split_steps += result.was_split
        if self._drafts is not None:
            self._drafts.step_done(result)
        self._busy = self._busy * IDLE_WINDOW + result.busy
        self._idle = self._idle * IDLE_WINDOW + result.idle
        self._busy_sum += result.busy
        self._idle_sum += result.idle
        self._histograms["step_duration_seconds"].observe_one(result.busy)
        if len(result.assert_counts):
            self._device_counts = result.assert_counts

    def dropped(self, count: int) -> None:
        """`count` tokens of the newest result were dropped because their owners lost their rows by that same result."""
        self._stale_results += count

    def surplus(self, count: int) -> None:
        """`count` tokens of the newest result stood behind the end of their request, and were dropped."""
        if self._drafts is not None:
            self._drafts.dropped(count)

    def tokens(self, reqs: list[Req], positions: np.ndarray, gaps: np.ndarray, now: float) -> None:
        """New tokens of one step: int64[n] output positions, float64[n] seconds since the request's token before."""
        self._generation_tokens += len(reqs)
        self._last_step_at = now
        later = positions > 0
        if np.count_nonzero(later) < len(reqs):
            for i in np.flatnonzero(~later).tolist():
                self._first_token(reqs[i], now)
            gaps = gaps[later]
        self._histograms["inter_token_latency_seconds"].observe(gaps)

    def _first_token(self, req: Req, now: float) -> None:
        req.first_token_at = now
        self._histograms["time_to_first_token_seconds"].observe_one(now - req.arrived_at, req.trace_id)
        if req.scheduled_at is not None:
            self._histograms["request_prefill_time_seconds"].observe_one(now - req.scheduled_at, req.trace_id)

    def embedded(self, req: Req, now: float) -> None:
        """The vector of the embedding `req` has arrived."""
        self._histograms["embedding_latency_seconds"].observe_one(now - req.arrived_at, req.trace_id)

    def ended(self, req: Req, reason: str, now: float) -> None:
        """`req` has ended; `reason` is the name under which that is counted."""
        self.finished[reason] += 1
        self._histograms["e2e_request_latency_seconds"].observe_one(now - req.arrived_at, req.trace_id)
        if req.first_token_at is None:
            return
        seconds, tokens = now - req.first_token_at, len(req.outputs)
        self._histograms["request_decode_time_seconds"].observe_one(seconds, req.trace_id)
        self._histograms["request_generation_tokens"].observe_one(tokens)
        if tokens > 1:
            per_token = seconds / (tokens - 1)
            self._histograms["request_time_per_output_token_seconds"].observe_one(per_token, req.trace_id)

    def assert_failures(self) -> dict[str, int]:
        """Violations so far by name of the check, on the host and on the device; every name is present."""
        device = dict(zip(DEVICE_CHECKS, self._device_counts.tolist(), strict=True))
        return {**invariants.FAILURES, **device}

    def publish(self, memory: RequestMemory, running: int, waiting: int) -> EngineStats:
        """The snapshot after this step; `running` and `waiting` are numbers of requests."""
        elapsed = self._busy + self._idle
        host = HostCacheStats() if self.host_cache is None else self.host_cache.stats()
        return EngineStats(
            step=self._step,
            pools=memory.stats(),
            running=running,
            waiting=waiting,
            leased_pages=memory.leases.diverted,
            host_cache_bytes=host.nbytes,
            rejoined_requests=host.rejoined,
            host_copies_dropped=host.dropped,
            host_fetched_tokens=host.fetched_tokens,
            host_kept_tokens=host.kept_tokens,
            host_evicted_tokens=host.evicted_tokens,
            **host.disk,
            page_size=memory.page_size,
            chunked_prefill_size=self._most_prompt_tokens,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            generation_tokens=self._generation_tokens,
            computed_tokens={"prefill": self._prefilled, "decode": self._decoded},
            preemptions=self.preemptions,
            priority_preemptions=self.priority_preemptions,
            share_preemptions=self.share_preemptions,
            restart_preemptions=self.restart_preemptions,
            recomputed_tokens=self.recomputed_tokens,
            stale_results=self._stale_results,
            split_steps=self._split_steps,
            drafts=None if self._drafts is None else self._drafts.stats(),
            device_idle_ratio=self._idle / elapsed if elapsed else 0.0,
            device_busy_seconds=self._busy_sum,
            device_idle_seconds=self._idle_sum,
            phase_seconds=self._phases.by_name(),
            last_step_at=self._last_step_at,
            finished=dict(self.finished),
            assert_failures=self.assert_failures(),
            histograms={name: histogram.stats() for name, histogram in self._histograms.items()},
        )
