"""The statistics once more, from what clients saw, what the device did and when: production's must say exactly this.

All times of a world are multiples of a power of two, so that sums of them are exact in whatever order they are added.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise, repeat

import numpy as np

from core.batch.schedule_batch import ScheduleBatch
from core.types.stats import EngineStats, HistogramStats, PoolStats
from tests.proofs.sim.clients import Client
from tests.proofs.sim.family import Family, View
from tests.proofs.sim.story import Violation
from tests.proofs.sim.structures import tree

FIRST = 64
"""Steps of the scheduler before the first comparison; before each next one twice as many, and one when all have left:
each looks at everything since the beginning.
"""
PAST = 0.98
"""Weight of the past in the idle ratio."""
REASONS = {
    "DeadlinePassed": "deadline_exceeded",
    "QueueTimeout": "queue_timeout",
    "SlowConsumer": "slow_consumer",
    "RequestFailed": "request_failed",
    "Draining": "draining",
}
"""What an error is counted as."""


class Measures(Family):
    """Counts steps as they are planned and executed; all of clients is worked out of their own records when asked."""

    def __init__(self, view: View) -> None:
        super().__init__(view)
        self._looks, self._next = 0, FIRST
        self._starved = True
        """Nothing was left to compute when the scheduler stepped last: the device's wait is not its fault."""
        self._excused: set[int] = set()
        """Steps of the device before which it may wait."""
        self._tokens: list[float] = []
        self._requests: list[float] = []
        self._busy: list[float] = []
        self._computed = Counter(prefill=0, decode=0)
        self._busy_past = self._idle_past = self._idle_sum = 0.0
        self._taken = 0
        self._sampled = 0
        self._last_token_at = 0.0
        self._generated = 0

    def planned(self, batch: ScheduleBatch | None) -> None:
        """A token behind the last known one is decoded; all others are filled in."""
        if batch is None:
            return
        if self._starved:
            self._excused.add(batch.step_id)
        self._starved = False
        lens = batch.extend_lens.tolist()
        self._tokens.append(sum(lens))
        self._requests.append(len(lens))
        decoded = sum(
            length
            for client, length in zip(map(self._client, batch.rows.tolist()), lens, strict=True)
            if client.admissions[-1].planned > client.admissions[-1].target
        )
        self._computed["decode"] += decoded
        self._computed["prefill"] += sum(lens) - decoded

    def _client(self, row: int) -> Client:
        client: Client = self.view.scheduler.running.reqs[row].sink
        return client

    def after_step(self) -> None:
        """Results were taken before anything else of the step."""
        device = self.view.device
        for step in device.take_timed():
            idle = 0.0 if step.step_id in self._excused else step.waited
            self._taken = step.step_id
            self._sampled += step.sampled
            self._busy.append(step.busy)
            self._busy_past = self._busy_past * PAST + step.busy
            self._idle_past = self._idle_past * PAST + idle
            self._idle_sum += idle
            self._excused.discard(step.step_id)
        self._starved = self._starved or not device.in_flight
        generated = self.view.clients.received
        if generated != self._generated:
            self._generated, self._last_token_at = generated, self.view.now
        self._looks += 1
        if self._looks == self._next:
            self._next *= 2
            self.compare()

    def when_empty(self) -> None:
        """The books are closed."""
        self.compare()
        self.view.hits.counts["stale_result"] += self._stale()

    def compare(self) -> None:
        """Production's snapshot of this moment against these books."""
        scheduler, every = self.view.scheduler, [*self.view.clients.gone, *self.view.clients.live.values()]
        tally = scheduler.tally
        stats = type(tally).publish(tally, scheduler.memory, len(scheduler.running), len(scheduler.waiting))
        expected = self._numbers(every)
        told = {name: getattr(stats, name) for name in expected}
        if told != expected:
            wrong = {name: (told[name], expected[name]) for name in expected if told[name] != expected[name]}
            raise Violation("stats", f"told and expected: {wrong}")
        self._compare_pools(stats)
        samples = self._samples(every)
        for name, histogram in stats.histograms.items():
            # A third of a tick is no power of two: sums of such times depend on their order.
            rounded = self.view.scenario.drafts is not None and name == "inter_token_latency_seconds"
            check_histogram(name, histogram, samples.get(name, []), rounded=rounded)

    def _numbers(self, every: list[Client]) -> dict[str, object]:
        """By field of `EngineStats`."""
        seats = list(self.view.seated())
        ends = Counter(_reason(client) for client in self.view.clients.gone)
        elapsed = self._busy_past + self._idle_past
        stays = [(client, place, stay) for client in every for place, stay in enumerate(client.admissions)]
        return {
            "step": self._taken,
            "running": len(seats),
            "waiting": len(self.view.clients.live) - len(seats),
            "prompt_tokens": sum(client.sent for client, place, _ in stays if place == 0),
            "cached_tokens": sum(stay.cached for _, place, stay in stays if place == 0),
            "generation_tokens": sum(len(client.tokens) for client in every),
            "computed_tokens": dict(self._computed),
            "preemptions": sum(client.gave_way + client.forced + client.by_class + client.by_share for client in every),
            "priority_preemptions": sum(client.by_class for client in every),
            "share_preemptions": sum(client.by_share for client in every),
            "recomputed_tokens": sum(
                stay.target - stay.cached + client.encoder_len for client, place, stay in stays if place
            ),
            "stale_results": self._stale(),
            "device_idle_ratio": self._idle_past / elapsed if elapsed else 0.0,
            "device_busy_seconds": added(self._busy),
            "device_idle_seconds": self._idle_sum,
            "last_step_at": self._last_token_at,
            "finished": {"stop": 0, "length": 0, "cancelled": 0, **ends},
        }

    def _stale(self) -> int:
        """A step of a row that neither reached a client nor failed one was waste."""
        failed = sum(client.failed for client in self.view.clients.gone)
        return self._sampled - self.view.clients.served - failed

    def _compare_pools(self, stats: EngineStats) -> None:
        """Rows and pages; of a cached page that a row reads, the row is counted, and of one that is lent, the lease."""
        memory, scenario = self.view.memory, self.view.scenario
        rows = [client.req.row for client in self.view.seated()]
        used = {page for row in rows for page in memory._pages[row, : memory._count[row]].tolist()}
        used.update(np.flatnonzero(memory.leases._coming).tolist())
        used.update(page for node in memory.leases.nodes for each in node.path() for page in each.pages.tolist())
        cached = int(
            tree(memory.cache)._owned[[page for page in range(1, scenario.pages + 1) if page not in used]].sum()
        )
        expected = (
            PoolStats("req", scenario.rows, len(rows)),
            PoolStats("kv_page", scenario.pages, len(used), cached),
        )
        if stats.pools[:2] != expected:
            raise Violation("stats", f"pools told {stats.pools[:2]}, expected {expected}")

    def _samples(self, every: list[Client]) -> dict[str, list[float]]:
        """By histogram, what it must have observed; of endings in their order, since those sums are not exact."""
        started = [client for client in every if client.times]
        gone = self.view.clients.gone
        spoke = [client for client in gone if client.times]
        decode = [client.ended_at - client.times[0] for client in spoke]
        admitted = [client for client in every if client.admissions]
        return {
            "time_to_first_token_seconds": [client.times[0] - client.arrived for client in started],
            "inter_token_latency_seconds": [gap for client in started for gap in _gaps(client)],
            "request_time_per_output_token_seconds": [
                seconds / (len(client.tokens) - 1)
                for client, seconds in zip(spoke, decode, strict=True)
                if len(client.tokens) > 1
            ],
            "queue_time_seconds": [client.admissions[0].at - client.arrived for client in admitted],
            "request_prefill_time_seconds": [client.times[0] - client.admissions[0].at for client in started],
            "request_decode_time_seconds": decode,
            "e2e_request_latency_seconds": [client.ended_at - client.arrived for client in gone],
            "request_prompt_tokens": [client.sent for client in admitted],
            "request_generation_tokens": [len(client.tokens) for client in spoke],
            "step_duration_seconds": self._busy,
            "step_tokens": self._tokens,
            "step_requests": self._requests,
        }


def _gaps(client: Client) -> Iterator[float]:
    """Between tokens; those of one step share the time since the step before."""
    for (sooner, _), (later, count) in pairwise(client.steps):
        yield from repeat((later - sooner) / count, count)


def check_histogram(name: str, told: HistogramStats, values: list[float], *, rounded: bool = False) -> None:
    """How many values are at or below each bound, and their sum, which may be `rounded`."""
    ordered = sorted(values)
    counts = tuple(bisect_right(ordered, bound) for bound in told.bounds)
    if list(told.bounds) != sorted(told.bounds) or told.bounds[-1] != float("inf"):
        raise Violation("stats", f"{name} has bounds {told.bounds}")
    total = added(values)
    if told.counts != counts or not (math.isclose(told.total, total) if rounded else told.total == total):
        raise Violation("stats", f"{name} told {told.counts}, {told.total}; expected {counts}, {total}")


def added(values: list[float]) -> float:
    """One after another: `sum` corrects itself in newer versions of Python, which the engine does not."""
    total = 0.0
    for value in values:
        total += value
    return total


def _reason(client: Client) -> str:
    ended = client.ended
    assert ended is not None, "among those who are gone"
    return ended.reason.value if ended.reason is not None else REASONS[type(ended.error).__name__]
