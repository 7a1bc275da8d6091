"""How many drafts a step verifies: what promises most tokens per second, given what was right and what steps take."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from core.batch.result import Accepted
from core.scheduler.draft_depth import PROBE_EVERY, PROBE_STEPS, AdaptiveDepth, StepTimes

MOST = 6
CHEAP = StepTimes((1, 64), (0.020, 0.022))
"""Weights take the time, as with a large model and few rows."""
DEAR = StepTimes((1, 64), (0.001, 0.064))
"""Each token takes as long as the first."""

Right = Callable[[int], int]


def step(rows: int, depth: int, right: int, tried: int | None = None) -> Accepted:
    """Each of `rows` tried as many drafts as it could, or `tried`, of which the first `right` were right."""
    tried = depth if tried is None else min(tried, depth)
    counts = np.full(rows, 1 + min(right, tried))
    return Accepted(counts, np.full(rows, tried), np.full(rows, depth + 1))


def play(
    depth: AdaptiveDepth, times: StepTimes, steps: int, rows: int, right: int, tried: int | None = None
) -> list[int]:
    chosen = []
    for _ in range(steps):
        count = depth.drafts(rows)
        chosen.append(count)
        if count:
            seen = step(rows, count, right, tried)
            depth.observe(seen, times.of(rows + int(seen.proposed.sum())))
    return chosen


def settled(chosen: list[int]) -> set[int]:
    """The numbers outside of probes, once they have settled."""
    return {
        count for at, count in enumerate(chosen, start=1) if at > len(chosen) // 2 and at % PROBE_EVERY >= PROBE_STEPS
    }


@pytest.mark.parametrize("right", [1, 2, 4])
def test_where_drafts_cost_little_all_that_are_right_are_tried(right: int) -> None:
    chosen = settled(play(AdaptiveDepth(MOST, CHEAP), CHEAP, 600, rows=1, right=right))
    assert min(chosen) >= right


def test_wrong_drafts_are_given_up_where_they_cost_something() -> None:
    assert settled(play(AdaptiveDepth(MOST, DEAR), DEAR, 600, rows=1, right=0)) == {0}


def test_as_many_as_are_right_where_each_costs_a_step() -> None:
    """Each right draft saves as much as it costs beside what a step costs anyway."""
    beside = StepTimes((1, 64), (0.0015, 0.0645))
    assert max(settled(play(AdaptiveDepth(MOST, beside), beside, 600, rows=1, right=2))) == 2


def test_what_was_given_up_comes_back_with_a_probe() -> None:
    depth = AdaptiveDepth(MOST, DEAR)
    play(depth, DEAR, 600, rows=1, right=0)
    cheap = play(depth, CHEAP, 40 * PROBE_EVERY, rows=1, right=MOST)
    assert settled(cheap) == {MOST}


def test_many_rows_leave_no_room_for_drafts() -> None:
    """32 rows keep the machine busy; a draft in three is right."""
    depth = AdaptiveDepth(MOST, DEAR)
    assert settled(play(depth, DEAR, 300, rows=32, right=0)) == {0}


def test_where_there_is_nothing_to_try_nothing_is_lost_by_asking() -> None:
    """Random text: the index finds no words again. What is not tried costs nothing, so either number will do."""
    depth = AdaptiveDepth(MOST, DEAR)
    chosen = play(depth, DEAR, 300, rows=4, right=0, tried=0)
    assert set(chosen) <= set(range(MOST + 1))


def test_probes_come_at_their_time_and_end() -> None:
    chosen = play(AdaptiveDepth(MOST, DEAR), DEAR, 4 * PROBE_EVERY, rows=2, right=0)
    late = chosen[2 * PROBE_EVERY - 1 : 3 * PROBE_EVERY - 1]
    assert late[:PROBE_STEPS] == [MOST] * PROBE_STEPS and not any(late[PROBE_STEPS:])


def test_times_go_on_along_a_line() -> None:
    times = StepTimes((1, 2, 4), (1.0, 1.5, 2.5))
    assert [times.of(each) for each in (1, 1.5, 2, 3, 4, 6)] == [1.0, 1.25, 1.5, 2.0, 2.5, 3.5]
    assert StepTimes((1,), (1.0,)).of(9) == 1.0
