"""Figures that operators judge the engine by, exact under a fake clock: idle seconds, gaps between tokens."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate, pairwise

import numpy as np
import pytest

from core.histogram import TOKEN_SECONDS
from core.types.request import Req
from core.types.sampling_params import SamplingParams
from core.types.stats import HistogramStats
from tests.unit.core.scheduler.fake_device import ClockedEngine
from tests.unit.core.scheduler.harness import Harness

BUSY, HOST = 0.375, 0.125
"""Seconds of a forward pass, and of the host between two; sums of them are exact."""

FORGETS = 0.98
"""Weight of a step in the idle ratio beside that of the step after it."""


def request(tokens: int) -> Req:
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    return Req("r", 0, np.arange(5, dtype=np.int64), params, 0, tokens)


def weighted(seconds: list[float]) -> float:
    """The sum over steps, oldest first, each `FORGETS` times as heavy as the one after it."""
    return sum(each * FORGETS**age for age, each in enumerate(reversed(seconds)))


def test_a_device_that_waits_for_the_host_is_idle_for_exactly_so_long() -> None:
    engine = ClockedEngine(BUSY)
    engine.scheduler.intake.add(request(6))
    engine.serve(HOST)
    stats = engine.scheduler.stats
    assert (stats.step, stats.device_busy_seconds) == (6, 6 * BUSY)
    assert stats.device_idle_seconds == 5 * HOST, "before its first step there was nothing to do"
    idle, busy = weighted([0.0] + [HOST] * 5), weighted([BUSY] * 6)
    assert stats.device_idle_ratio == pytest.approx(idle / (idle + busy), rel=1e-12)


def test_a_device_that_never_waits_is_never_idle() -> None:
    engine = ClockedEngine(BUSY)
    engine.scheduler.intake.add(request(6))
    engine.serve(0.0)
    stats = engine.scheduler.stats
    assert (stats.device_busy_seconds, stats.device_idle_seconds, stats.device_idle_ratio) == (6 * BUSY, 0.0, 0.0)


def test_time_without_requests_is_not_idle_time() -> None:
    engine = ClockedEngine(BUSY)
    for _ in range(3):
        engine.clock.now += 1000.0
        engine.scheduler.intake.add(request(3))
        engine.serve(HOST)
    stats = engine.scheduler.stats
    assert (stats.step, stats.device_idle_seconds) == (9, 3 * 2 * HOST)
    idle, busy = weighted([0.0, HOST, HOST] * 3), weighted([BUSY] * 9)
    assert stats.device_idle_ratio == pytest.approx(idle / (idle + busy), rel=1e-12)


def test_the_ratio_follows_the_last_steps_and_the_sums_forget_nothing() -> None:
    engine = ClockedEngine(BUSY)
    for host in (HOST, 0.0):
        engine.scheduler.intake.add(request(50))
        engine.serve(host)
    stats = engine.scheduler.stats
    assert stats.device_idle_seconds == 49 * HOST
    assert stats.device_busy_seconds == 100 * BUSY
    idle, busy = weighted([0.0] + [HOST] * 49 + [0.0] * 50), weighted([BUSY] * 100)
    assert stats.device_idle_ratio == pytest.approx(idle / (idle + busy), rel=1e-12)
    assert stats.histograms["step_duration_seconds"].total == 100 * BUSY


def test_only_a_step_behind_which_nothing_was_left_to_do_begins_after_a_pause() -> None:
    """`after_idle` of each batch: what makes the wait before it count or not."""
    harness = Harness()
    harness.add([1, 2, 3], max_tokens=3)
    for run in (False, True, True):
        harness.step(run)
    # Its last step is on the device, and no other request has anything to compute.
    harness.step(run=False)
    assert harness.executor.in_flight == 1 and len(harness.executor.batches) == 3
    harness.add([4, 5, 6], max_tokens=2)
    harness.drain()
    harness.add([7, 8, 9], max_tokens=1)
    harness.drain()
    assert [batch.after_idle for batch in harness.executor.batches] == [True, *[False] * 4, True]


def cumulative(values: list[float]) -> tuple[int, ...]:
    """How many fell at or below each bound, `TOKEN_SECONDS` and +Inf."""
    counts = [0] * (len(TOKEN_SECONDS) + 1)
    for value in values:
        counts[bisect_left(TOKEN_SECONDS, value)] += 1
    return tuple(accumulate(counts))


@pytest.mark.parametrize("mixed_chunk", [True, False])
def test_every_gap_between_tokens_is_observed_once_and_exactly(mixed_chunk: bool) -> None:
    """Requests come, go, and follow others into their rows; with `mixed_chunk` off a newcomer makes the others wait.

    The time before a first token is no gap.
    """
    waits = [0.25, 0.0625, 2.0, 0.5, 0.125, 8.0, 0.03125, 1.0]
    harness = Harness(rows=2, depth=1, cache="none", mixed_chunk=mixed_chunk)
    reqs = [harness.add([n, n + 1, n + 2], max_tokens=tokens) for n, tokens in enumerate((5, 1, 7, 4, 2))]
    came: dict[Req, list[float]] = {req: [] for req in reqs}
    step = 0
    while harness.scheduler.has_work:
        # `step` adds the second.
        harness.now += waits[step % len(waits)] - 1.0
        harness.step()
        step += 1
        for req, times in came.items():
            times += [harness.now] * (len(harness.seen[req].tokens) - len(times))
    gaps = [later - earlier for times in came.values() for earlier, later in pairwise(times)]
    assert len(gaps) == 4 + 0 + 6 + 3 + 1 and len(set(gaps)) > 4
    stats = harness.scheduler.stats
    seen: HistogramStats = stats.histograms["inter_token_latency_seconds"]
    assert (seen.counts, seen.total) == (cumulative(gaps), sum(gaps))
    first = stats.histograms["time_to_first_token_seconds"]
    assert (first.counts[-1], first.total) == (5, sum(times[0] for times in came.values()))
    whole = stats.histograms["e2e_request_latency_seconds"]
    assert (whole.counts[-1], whole.total) == (5, sum(times[-1] for times in came.values()))
    decode = stats.histograms["request_decode_time_seconds"]
    assert (decode.counts[-1], decode.total) == (5, sum(times[-1] - times[0] for times in came.values()))
    assert stats.last_step_at == max(times[-1] for times in came.values())


def test_figures_are_renewed_after_5_ms_and_at_once_when_a_request_ends() -> None:
    harness = Harness()
    harness.add([1, 2, 3], max_tokens=40)
    short = harness.add([4, 5], max_tokens=17)
    shown, renewed = harness.scheduler.stats, list[float]()
    while harness.scheduler.has_work:
        harness.now -= 0.999
        ended = harness.seen[short].terminals
        harness.step()
        if harness.scheduler.stats is not shown:
            shown = harness.scheduler.stats
            renewed.append(harness.now)
        if harness.seen[short].terminals != ended:
            assert (renewed[-1], shown.finished["length"]) == (harness.now, 1)
    gaps = np.diff(renewed)
    assert len(gaps) > 6 and gaps.max() == pytest.approx(0.005) and (gaps < 0.0049).sum() < 4, gaps
    assert (shown.running, shown.finished["length"]) == (0, 2)
    assert shown.generation_tokens == 57
