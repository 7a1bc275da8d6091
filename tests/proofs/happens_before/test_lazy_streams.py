"""The lazy device on its own: late, in stream order, held back by events, and honest about what was not waited for."""

from __future__ import annotations

import pytest
import torch

from tests.proofs.happens_before.clocks import VectorClocks
from tests.proofs.happens_before.lazy_ops import POISON_INT
from tests.proofs.happens_before.lazy_streams import LazyStreams

SEEDS = range(8)


def stalled(seed: int = 0) -> LazyStreams:
    return LazyStreams(seed, eagerness=0.0)


def test_work_is_late_and_keeps_its_order() -> None:
    streams, values = stalled(), torch.arange(4)
    with streams.on_forward():
        doubled = values * 2
        values += 1
        again = values * 2
        views = again.view(2, 2)[1]
    assert doubled.tolist() == again.tolist() == [POISON_INT] * 4 and values.tolist() == [0, 1, 2, 3]
    streams.synchronize()
    assert (doubled.tolist(), again.tolist(), views.tolist()) == ([0, 2, 4, 6], [2, 4, 6, 8], [6, 8])


def test_host_values_drain_their_stream() -> None:
    streams, values = stalled(), torch.arange(4)
    with streams.on_forward():
        doubled = values * 2
        assert int(doubled.sum()) == 12
        assert doubled[doubled > 2].tolist() == [4, 6]


@pytest.mark.parametrize("waits", [True, False])
def test_only_an_event_holds_another_stream_back(waits: bool) -> None:
    seen = set()
    for seed in SEEDS:
        streams = stalled(seed)
        published, copied = streams.new_event(), streams.new_event()
        with streams.on_forward():
            made = torch.zeros(3).add(5)
            published.record(streams.forward)
        if waits:
            published.wait(streams.copy)
        with streams.on_copy():
            (host,) = streams.fetch([made])
            copied.record(streams.copy)
        assert host.isnan().all() and not copied.query()
        copied.synchronize()
        seen.add(bool((host == 5).all()))
    assert seen == ({True} if waits else {True, False})


def test_an_event_is_passed_when_its_own_work_is_done_not_later_work() -> None:
    streams = stalled()
    early, late = streams.new_event(), streams.new_event()
    assert early.query(), "nothing was recorded, so there is nothing to wait for"
    with streams.on_forward():
        first = torch.zeros(1).add(1)
        early.record(streams.forward)
        second = torch.zeros(1).add(2)
        late.record(streams.forward)
    early.synchronize()
    assert first.item() == 1 and second.isnan().all() and not late.query()


def test_a_failure_surfaces_at_the_next_wait() -> None:
    streams = stalled()
    with streams.on_forward():
        torch._assert_async(torch.zeros(1).bool().any(), "relay_unwritten_read")
    with pytest.raises(RuntimeError, match="relay_unwritten_read"):
        streams.synchronize()


def test_every_operation_is_recorded_by_the_memory_it_touches() -> None:
    clocks = VectorClocks()
    streams = LazyStreams(0, clocks, eagerness=0.0)
    shared = torch.zeros(4)
    with streams.on_forward():
        shared[1:3].add_(1)
    assert not clocks.races
    with streams.on_copy():
        streams.fetch([shared[:1]])
    assert [(race.first.writes, race.second.writes) for race in clocks.races] == [(True, False)]


def test_streams_nest_and_the_innermost_takes_the_work() -> None:
    streams = stalled()
    forward, copy = streams.forward, streams.copy
    with streams.on_forward():
        with streams.on_copy():
            inner = torch.zeros(1).add(3)
        assert (forward.submitted, copy.submitted) == (0, 1)
        outer = torch.zeros(1).add(4)
        assert (forward.submitted, copy.submitted) == (1, 1)
    streams.synchronize()
    assert (inner.item(), outer.item()) == (3, 4)
