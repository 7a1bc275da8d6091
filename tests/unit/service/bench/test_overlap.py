"""`slipstream bench overlap` and `asserts`: the emulated device by hand, wrong tokens counted, medians, units."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from click.testing import CliRunner

from core.device.checks import AssertMode
from core.types.sampling_params import SamplingParams
from service.bench import emulated, overlap
from service.bench.asserts import check_figures
from service.bench.emulated import Timeline, TimelineEvent
from service.bench.features import FEATURES, PLAIN
from service.bench.overlap import OverlapFigures
from tests.support.fakes.hand_clock import HandClock, by_hand


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[HandClock]:
    return by_hand(monkeypatch, emulated)


def test_steps_of_the_emulated_device_follow_each_other_and_pauses_are_idle(clock: HandClock) -> None:
    timeline, event = Timeline(2.0), TimelineEvent
    timeline.occupy()
    clock.work(0.5)
    timeline.occupy()
    done = event(timeline)
    done.record()
    assert (timeline.idle, list(timeline.leads)) == (0.0, [1.5])
    clock.work(3.25)
    assert not done.query(), "the second step began when the first had ended"
    clock.work(0.25)
    assert done.query()
    clock.work(1.0)
    timeline.occupy()
    assert (timeline.idle, timeline.busy, timeline.steps) == (1.0, 6.0, 3)
    assert timeline.idle_share == pytest.approx(1 / 7)


def test_a_warm_up_is_forgotten(clock: HandClock) -> None:
    timeline = Timeline(2.0)
    timeline.occupy()
    clock.work(5.0)
    timeline.occupy()
    timeline.reset()
    assert (timeline.idle_share, timeline.steps, len(timeline.leads)) == (0.0, 0, 0)
    clock.work(4.0)
    timeline.occupy()
    assert timeline.idle == 2.0, "the device was busy on until the step's end"


def test_a_feature_asks_for_itself_and_leaves_the_length_alone() -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    assert PLAIN.request([1, 2], sampling).sampling == sampling
    for name, feature in FEATURES.items():
        asked = feature.request([1, 2], sampling)
        assert (asked.token_ids, asked.sampling.max_tokens) == ((1, 2), 9)
        assert (asked.constraint is not None) == (name in ("grammar", "xgrammar", "all"))
        assert asked.want_text == (name in ("stop", "all")), name
        assert (asked.sampling.n, feature.n) == ((4, 4) if name in ("n", "all") else (1, 1))
        assert asked.sampling.logprobs == (name in ("logprobs", "all"))
        assert (asked.sampling.repetition_penalty != 1.0) == (name in ("penalties", "all"))


async def test_every_wrong_token_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    right = emulated.expected_output

    def off_by_two(prompt: list[int], count: int, vocab: int) -> list[int]:
        first, second, *others = right(prompt, count, vocab)
        return [first + 1, second + 1, *others]

    monkeypatch.setattr(overlap, "expected_output", off_by_two)
    run = await overlap.measure_overlap(overlap=True, requests=3, step_ms=1.0, tokens=6)
    assert run.wrong_tokens == 3 * 2


def test_the_median_round_of_a_feature_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = iter([0.3, 0.1, 0.2])

    async def measured(**_: object) -> OverlapFigures:
        return OverlapFigures(next(shares), 1.0, 1, 1.0, 0)

    monkeypatch.setattr(overlap, "measure_overlap", measured)
    found = overlap._with_features("n", requests=4, step_ms=1.0, steps=1, rounds=3)
    assert found["n"].idle_share == 0.2


def test_checks_cost_what_they_add_as_a_share_of_a_step() -> None:
    by_mode = {AssertMode.OFF: 10e-6, AssertMode.COUNT: 30e-6, AssertMode.TRAP: 60e-6}
    assert check_figures(by_mode, step_seconds=0.001) == {
        "off_us": 10.0,
        "count_us": 30.0,
        "trap_us": 60.0,
        "count_percent": 2.0,
        "trap_percent": 5.0,
    }


def test_checks_beside_steps_of_no_time_are_a_share_of_what_the_host_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    async def measured(**_: object) -> OverlapFigures:
        return OverlapFigures(1.0, 0.5, 1, 1.0, 0)

    by_mode = {AssertMode.OFF: 10e-6, AssertMode.COUNT: 30e-6, AssertMode.TRAP: 60e-6}
    monkeypatch.setattr(overlap, "measure_overlap", measured)
    monkeypatch.setattr(overlap, "scheduler_cost", lambda running: 1e-6)
    monkeypatch.setattr(overlap, "check_costs", lambda *_: by_mode)
    told = CliRunner().invoke(overlap.overlap, ["--step-ms", "0", "--rounds", "1"])
    assert told.exit_code == 0, told.output
    assert "share of a step of 0.5 ms over OFF" in told.output and "20.0 µs    4.00 %" in told.output
    assert CliRunner().invoke(overlap.overlap, ["--step-ms", "-1"]).exit_code == 2
