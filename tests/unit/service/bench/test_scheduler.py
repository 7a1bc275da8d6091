"""What `slipstream bench scheduler` prints is what was timed: units, no first runs, nothing cached by accident."""

from __future__ import annotations

import pytest

from core.scheduler.scheduler import Scheduler
from service.bench import admission_cost, loop_step, scheduler, scheduler_cost
from service.bench.loop_step import PARTS, LoopStep, StepParts
from service.bench.scheduler_cost import PAGE_SIZE, WARM_UP
from tests.support.fakes.hand_clock import by_hand


@pytest.mark.parametrize(("cached", "found"), [(False, 0), (True, 3 * PAGE_SIZE)])
def test_a_prompt_is_admitted_with_nothing_or_all_but_a_page_of_it_cached(
    monkeypatch: pytest.MonkeyPatch, cached: bool, found: int
) -> None:
    made: list[Scheduler] = []

    def new_scheduler(*args: object, **options: object) -> Scheduler:
        made.append(scheduler_cost.new_scheduler(*args, **options))  # type: ignore[arg-type]
        return made[0]

    monkeypatch.setattr(admission_cost, "new_scheduler", new_scheduler)
    admission_cost.admission_seconds(4, cached=cached)
    # The first is alone in the tree either way, and is not timed.
    assert made[0].stats.cached_tokens == found * (admission_cost.REPEATS - 1)


def test_the_first_insert_and_what_comes_after_each_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, cache = by_hand(monkeypatch, admission_cost), admission_cost.RadixCache
    took = iter([50.0, *[1.0] * 7, *[3.0] * 7])
    held: list[int] = []

    class Timed(cache):  # type: ignore[misc, valid-type]
        def insert(self, *args: object) -> object:
            held.append(self.cached_pages)
            clock.work(next(took))
            return super().insert(*args)

        def clear(self) -> object:
            clock.work(1000.0)
            return super().clear()

    monkeypatch.setattr(admission_cost, "RadixCache", Timed)
    assert admission_cost.insert_seconds(4) == 2.0
    assert set(held) == {0}, "each goes into an empty tree"


def test_steps_of_the_warm_up_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, step, seen = by_hand(monkeypatch, scheduler_cost), Scheduler.step, []

    def timed(self: Scheduler, now: float) -> None:
        seen.append(now)
        clock.work(9.0 if len(seen) <= WARM_UP else 2.0)
        step(self, now)

    monkeypatch.setattr(Scheduler, "step", timed)
    assert scheduler_cost.scheduler_cost(2, 10) == 2.0


def test_a_step_is_the_sum_of_its_parts_without_the_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    by_hand(monkeypatch, loop_step, per_look=1.0)
    step = LoopStep(3, 96)
    once, often = step.measure(1), step.measure(32)
    assert once.seconds == often.seconds, "means over the steps, not their sums"
    assert once.step == sum(once.seconds[part] for part in PARTS if part != "read") > 0 < once.seconds["read"]


def test_curves_are_in_microseconds_and_of_what_their_names_say(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []

    def cost(*args: object, **options: object) -> float:
        asked.append((*args, *sorted(options.items())))
        return 3e-6 if "cached" in options or "edges" in options else 2e-6

    for name in ("match_seconds", "insert_seconds", "admission_seconds", "match_seconds_in_tree"):
        monkeypatch.setattr(scheduler, name, cost)
    curves = [*scheduler.prompt_curves([32 * PAGE_SIZE]), *scheduler.tree_curves([7])]
    assert asked == [(32,), (32, ("edges", 32)), (32,), (32,), (32, ("cached", True)), (7,)]
    shown = [next(iter(curve.points.values())) for curve in curves]
    assert shown == pytest.approx([2.0, 3.0, 2.0, 2.0, 3.0, 2.0])
    assert {curve.unit for curve in curves} == {"µs"}


def test_the_steady_step_is_a_median_in_microseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = iter([4e-6, 90e-6, 5e-6])
    monkeypatch.setattr(scheduler, "scheduler_cost", lambda *_: next(costs))
    rounds = {False: [1.0, 80.0, 2.0], True: [6.0, 70.0, 7.0]}

    def seen(size: int, count: int, *, text: bool) -> list[StepParts]:
        return [StepParts(dict.fromkeys(PARTS, each * 1e-6)) for each in rounds[text]]

    monkeypatch.setattr(scheduler, "_rounds", seen)
    alone, whole, each, both, *parts, text, _, _ = scheduler.loop_curves([16], 3)
    assert [alone.points[16], whole.points[16]] == pytest.approx([5.0, 10.0])
    assert [each.points[16], both.points[16]] == pytest.approx([5 / 16, 10 / 16])
    assert [part.points[16] for part in parts] == pytest.approx([2.0] * len(PARTS))
    assert text.points[16] == pytest.approx(7.0)


def test_the_path_that_is_matched_has_as_many_edges_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[admission_cost.RadixCache] = []
    cache = admission_cost.RadixCache

    def make(page_size: int) -> admission_cost.RadixCache:
        made.append(cache(page_size))
        return made[-1]

    monkeypatch.setattr(admission_cost, "RadixCache", make)
    admission_cost.match_seconds(8, edges=4)
    (stored,) = [each.contents("") for each in made]
    assert len(stored) == 4
