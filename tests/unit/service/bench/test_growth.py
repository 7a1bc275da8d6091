"""`slipstream bench growth` and `scheduler`: every curve is measured, and what bends is told with its reason."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from service.bench import bench, growth_axes, growth_engine, growth_models
from service.bench.curve import Curve, exponent, table
from service.bench.growth_axes import AXES, Axis
from service.bench.growth_engine import Pace, Shape, paces
from service.bench.loop_step import PARTS


def figures(*command: str) -> dict[str, Any]:
    answer = CliRunner().invoke(bench, [*command, "--json"])
    assert answer.exit_code == 0, answer.output
    found: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("power", [0.0, 1.0, 1.7])
def test_the_exponent_of_a_power_is_that_power(power: float) -> None:
    sizes = [10, 40, 90, 700]
    assert exponent(sizes, [3.0 * size**power for size in sizes]) == pytest.approx(power)


def test_only_what_bends_is_given_a_reason() -> None:
    straight = Curve("straight", "µs", 1.0, "never printed", {10: 10.0, 100: 100.0, 1000: 1000.0})
    bent = Curve("bent", "µs", 1.0, "the reason", {10: 10.0, 100: 200.0, 1000: 4000.0})
    unknown = Curve("unknown", "µs", 0.0, points={10: 1.0, 1000: 9.0})
    text = table("Title", "size", [straight, bent, unknown])
    assert "bent bends: the reason" in text and "unknown bends: NO REASON KNOWN" in text
    assert "never printed" not in text
    assert text.count("**bends**") == 2


def test_the_tail_alone_decides() -> None:
    """A step has costs that do not grow; the first points show little else."""
    points = {size: 1000.0 + 0.001 * size**2 for size in (1, 10, 100, 10**4, 10**5, 10**6)}
    assert Curve("late", "µs", 1.0, points=points).bends
    assert not Curve("early", "µs", 1.0, points={size: points[size] for size in (1, 10, 100)}).bends


def test_scheduler_prints_all_its_parts() -> None:
    command = ("scheduler", "--running", "4,8,16", "--prompts", "64,128", "--trees", "2,4", "--rounds", "1")
    steady, prompts, trees = figures(*command).values()
    assert {f"- {part}" for part in PARTS} < set(steady)
    for size in ("4", "8", "16"):
        parts = sum(steady[f"- {part}"]["points"][size] for part in PARTS if part != "read")
        assert steady["whole step, streams attached"]["points"][size] == pytest.approx(parts)
    assert all(curve["points"].keys() == {"64", "128"} for curve in prompts.values())
    assert all(curve["points"].keys() == {"2", "4"} for curve in trees.values())


def test_growth_measures_an_axis() -> None:
    found = figures("growth", "--axes", "running", "--rounds", "1", "--quick")["running"]
    sizes = {str(size) for size in AXES["running"].sizes[:3]}
    assert all(curve["points"].keys() == sizes and min(curve["points"].values()) > 0 for curve in found.values())


def test_growth_refuses_an_axis_it_does_not_know() -> None:
    answer = CliRunner().invoke(bench, ["growth", "--axes", "running,luck"])
    assert answer.exit_code == 2 and "'luck' is none of running" in answer.output


def test_an_axis_is_measured_at_the_sizes_and_as_often_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[list[int], int]] = []

    def measure(sizes: Sequence[int], rounds: int, scratch: Path) -> list[Curve]:
        assert scratch.is_dir()
        asked.append((list(sizes), rounds))
        return [Curve("cost", "µs", 1.0, points={size: 2.0 * size for size in sizes})]

    monkeypatch.setitem(AXES, "luck", Axis("Luck", "dice", (1, 2, 4, 8), measure))
    found = figures("growth", "--axes", "luck", "--rounds", "5")
    assert found["luck"]["cost"]["points"] == {"1": 2.0, "2": 4.0, "4": 8.0, "8": 16.0}
    figures("growth", "--axes", "luck", "--quick")
    assert asked == [([1, 2, 4, 8], 5), ([1, 2, 4], 2)]


def test_axes_are_in_the_units_of_their_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def seen(shape: Shape, rounds: int, features: dict[str, Any] | None = None) -> dict[str, Pace]:
        return dict.fromkeys(features or ("plain",), Pace(shape.requests * 3e-6, 0.25, 1000.0))

    monkeypatch.setattr(growth_axes, "paces", seen)
    monkeypatch.setattr(growth_axes, "build_checkpoint", lambda *_, **__: 1)
    host, each, rate = AXES["running"].measure([4, 8], 1, tmp_path)
    assert host.points == pytest.approx({4: 12.0, 8: 24.0}) and host.unit == "µs/step"
    assert each.points == pytest.approx({4: 3.0, 8: 3.0}) and each.unit == "µs/step/request"
    assert rate.points == {4: 1000.0, 8: 1000.0}
    first, real = AXES["prompt"].measure([1024, 65_536], 1, tmp_path)
    assert first.points == {1024: 250.0, 65_536: 250.0} and first.unit == "ms"
    assert list(real.points) == [1024], "the real model is not asked for the longest"


def test_the_first_round_warms_up_and_medians_are_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = iter([Pace(90.0, 90.0, 90.0), Pace(1.0, 6.0, 7.0), Pace(2.0, 5.0, 9.0), Pace(3.0, 4.0, 8.0)])

    @asynccontextmanager
    async def started(shape: Shape) -> AsyncIterator[None]:
        yield

    async def pace(*_: object) -> Pace:
        return next(rounds)

    monkeypatch.setattr(growth_engine, "started", started)
    monkeypatch.setattr(growth_engine, "pace", pace)
    assert paces(Shape(1), 3) == {"plain": Pace(2.0, 5.0, 8.0)}


def test_the_most_memory_is_in_the_unit_of_the_memory_now() -> None:
    assert growth_models._peak_rss() >= 0.9 * growth_models._rss() > 10 * growth_models.MIB
