"""Mutants of statistics: the engine works, and says something else."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from typing import Any

import numpy as np

from core import histogram
from core.batch.schedule_batch import ScheduleBatch
from core.memory.request_memory import RequestMemory
from core.scheduler import tally
from core.scheduler.lifecycle import Lifecycle
from core.scheduler.planner import Planner
from core.scheduler.running import RunningSet
from core.scheduler.tally import Tally
from core.types.request import Req
from core.types.stats import PoolStats
from tests.proofs.sim.mutants import Patch, mutant, put


@mutant("stats")
def preemptions_are_not_counted(patch: Patch) -> None:
    """The metric says that all is well."""

    def silent(old: Any, self: Lifecycle, req: Req, **kwargs: Any) -> None:
        old(self, req, **kwargs)
        self._tally.preemptions -= 1

    put(patch, Lifecycle, "retract", silent)


@mutant("stats")
def gaps_begin_with_the_row(patch: Patch) -> None:
    """Behind a preemption a gap is counted from the last token of the request that had the row before."""

    def add(old: Any, self: RunningSet, req: Req, admission: Any) -> None:
        before = float(self.last_token_at[admission.row])
        old(self, req, admission)
        self.last_token_at[req.row] = before

    put(patch, RunningSet, "add", add)


@mutant("stats")
def every_wait_of_the_device_is_excused(patch: Patch) -> None:
    """It waits for the host, and the idle ratio says that there was nothing to do."""

    def freeze(old: Any, self: Planner, *args: Any) -> ScheduleBatch:
        batch: ScheduleBatch = old(self, *args)
        return replace(batch, after_idle=True)

    put(patch, Planner, "_freeze", freeze)


@mutant("stats")
def no_wait_of_the_device_is_excused(patch: Patch) -> None:
    """Nights without requests count as idle time."""
    put(patch, Planner, "_freeze", lambda old, self, *args: replace(old(self, *args), after_idle=False))


@mutant("stats")
def bounds_belong_to_the_bucket_above(patch: Patch) -> None:
    """`<` for `<=`."""
    patch.setattr(histogram, "bisect_left", bisect_right)


@mutant("stats")
def time_in_the_queue_ends_with_the_first_token(patch: Patch) -> None:
    """`queue_time_seconds` is observed where the prefill is over."""

    def first(old: Any, self: Tally, req: Req, now: float) -> None:
        old(self, req, now)
        self._histograms["queue_time_seconds"].observe_one(now - req.arrived_at)

    put(patch, Tally, "_first_token", first)


@mutant("stats")
def first_tokens_are_gaps(patch: Patch) -> None:
    """The time before a first token is observed as if a token had come before it."""

    def tokens(old: Any, self: Tally, reqs: Any, positions: Any, gaps: Any, now: float) -> None:
        old(self, reqs, positions, gaps, now)
        self._histograms["inter_token_latency_seconds"].observe(np.asarray(gaps)[positions == 0])

    put(patch, Tally, "tokens", tokens)


@mutant("stats")
def the_idle_ratio_forgets_too_fast(patch: Patch) -> None:
    """Of ten steps instead of fifty."""
    patch.setattr(tally, "IDLE_WINDOW", 0.9)


@mutant("stats")
def what_is_computed_again_is_not_counted(patch: Patch) -> None:
    """Preemption looks free."""

    def admit(old: Any, self: Lifecycle, *args: Any, **kwargs: Any) -> bool:
        before = self._tally.recomputed_tokens
        taken: bool = old(self, *args, **kwargs)
        self._tally.recomputed_tokens = before
        return taken

    put(patch, Lifecycle, "admit", admit)


@mutant("stats")
def cached_pages_count_as_used(patch: Patch) -> None:
    """The pool looks full, and an autoscaler adds machines."""

    def stats(old: Any, self: RequestMemory) -> tuple[PoolStats, ...]:
        rows, kv, *others = old(self)
        return (rows, replace(kv, used=kv.used + kv.cached, cached=0), *others)

    put(patch, RequestMemory, "stats", stats)
