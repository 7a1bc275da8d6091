"""The seam itself: what production pays for it, and that events and lanes are told as they are used."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from core.device.recorder import RecordedEvent
from core.device.streams import COPY, FORWARD, DeviceStreams
from core.executor.step import StepRunner
from tests.proofs.happens_before.clocks import VectorClocks
from tests.proofs.happens_before.harness import Ask, Scenario, play_lazily, play_plainly
from tests.unit.core.scheduler.counting import opcodes

CPU = torch.device("cpu")
LAYERS = 32
"""KV writes of a step in a model of usual depth; the model of these tests has one."""

MAX_HOOKS = 64
"""In a step. Unused, each is a test of an attribute (measured: 5 ns), so a step pays a third of a microsecond."""


def test_without_a_recorder_nothing_is_wrapped() -> None:
    streams = DeviceStreams(CPU)
    assert streams.recorder is None and not isinstance(streams.new_event(), RecordedEvent)


def test_lanes_and_events_are_told() -> None:
    clocks = VectorClocks()
    streams = DeviceStreams(CPU, clocks)
    event = streams.new_event()
    with streams.on_forward():
        clocks.wrote("kv", (1,))
        with streams.on_copy():
            clocks.wrote("table", (1,))
        event.record(streams.forward)
    event.wait(streams.copy)
    with streams.on_copy():
        clocks.read("kv", (1,))
    assert not clocks.races and {FORWARD, COPY} <= clocks.lanes
    clocks.wrote("kv", (1,))
    lanes = [next(lane for lane in (FORWARD, COPY) if race.between(lane, "MainThread")) for race in clocks.races]
    assert lanes == [FORWARD, COPY], "this thread waited for neither"
    event.synchronize()
    assert event.query()


def test_an_unused_seam_is_a_few_tests_of_an_attribute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call that a recorder gets is one such test when there is none."""
    calls: Counter[str] = Counter()
    for name in ("step", "read", "wrote", "recorded", "awaited", "passed", "enter"):
        monkeypatch.setattr(VectorClocks, name, lambda self, *_, name=name: calls.update([name]))
    monkeypatch.setattr(VectorClocks, "leave", lambda self: None)
    monkeypatch.setattr("tests.proofs.happens_before.lazy_ops.LazyOps._tell", lambda *_: None)
    outcome = play_lazily(Scenario([Ask([1, 2, 3], tokens=20)]), seed=0)
    hooks = calls.total() / outcome.stats.step + LAYERS - 1
    print(f"{hooks:.1f} hooks a step")
    assert LAYERS < hooks <= MAX_HOOKS
    holder = DeviceStreams(CPU)

    def unused() -> None:
        if holder.recorder is not None:
            raise AssertionError("there is none")

    assert opcodes(unused) - opcodes(lambda: None) <= 8, "a plain attribute, no property"


def test_a_recorder_reaches_everything_that_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A runner hands the streams' recorder to the pools; without one they keep none."""
    runners: list[StepRunner] = []
    launch = StepRunner.launch
    monkeypatch.setattr(StepRunner, "launch", lambda self, *args: runners.append(self) or launch(self, *args))
    scenario = Scenario([Ask([1, 2, 3], tokens=2, sampling={"presence_penalty": 1.0})])
    play_plainly(scenario)
    play_lazily(scenario, seed=0)
    for runner, present in ((runners[0], False), (runners[-1], True)):
        state, history = runner._state, runner._sampling._history
        assert history is not None
        holders = (state.pool, state.kv_pool, state.streams, history)
        assert [holder.recorder is not None for holder in holders] == [present] * 4
