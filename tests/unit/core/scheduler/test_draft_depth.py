"""Which drafts a step verifies: as many as pay, where they do."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from core.batch.result import Accepted, StepResult
from core.batch.spec_plan import NO_DRAFTS
from core.scheduler.draft_depth import (
    CERTAIN,
    FIRST,
    HIGHEST,
    LONG,
    LOSS,
    OFTEN,
    RARELY,
    SELDOM,
    TRIED,
    AdaptiveDepth,
    Pace,
    StepTimes,
)

MOST = 6
CHEAP = StepTimes((1, 64), (0.020, 0.022))
"""Weights take the time, as with a large model and few rows."""
DEAR = StepTimes((1, 64), (0.001, 0.064))
"""Each token takes as long as the first."""


def result(rows: int, seconds: float, got: int | None, proposed: int = MOST) -> StepResult:
    """Of a step in which each row got so many tokens; None for one that did not look for drafts."""
    owners, tokens = np.arange(rows), np.zeros(rows * (got or 1), np.int64)
    plain = StepResult(1, owners, owners, tokens, np.zeros(len(tokens), np.bool_), busy=seconds / 2, idle=seconds / 2)
    if got is None:
        return plain
    return replace(plain, accepted=Accepted(np.full(rows, got), np.full(rows, proposed), np.full(rows, MOST + 1)))


def play(depth: AdaptiveDepth, steps: int, rows: int, got: int, drafting: float, plain: float = 1.0) -> list[bool]:
    """Which steps were with drafts; these get `got` tokens a row and take `drafting` seconds, others take `plain`."""
    chosen = []
    for _ in range(steps):
        chosen.append(depth.aim(rows) is not NO_DRAFTS)
        depth.observe(result(rows, drafting if chosen[-1] else plain, got if chosen[-1] else None))
    return chosen


def stretches(chosen: list[bool]) -> list[tuple[bool, int]]:
    """(whether with drafts, steps) of each run of equal choices."""
    edges = [0, *(at for at in range(1, len(chosen)) if chosen[at] != chosen[at - 1]), len(chosen)]
    return [(chosen[begin], end - begin) for begin, end in itertools.pairwise(edges)]


@pytest.mark.parametrize(
    ("got", "drafting", "better", "between"),
    [(3, 1.5, True, RARELY), (1, 1.3, False, RARELY), (1, 1.05, False, OFTEN), (2, 1.9, True, OFTEN)],
)
def test_the_way_that_brings_more_is_gone_and_the_other_is_tried_at_times(
    got: int, drafting: float, better: bool, between: int
) -> None:
    chosen = stretches(play(AdaptiveDepth(MOST, CHEAP), 2000, 2, got, drafting))
    assert chosen[:2] == [(True, FIRST), (False, TRIED if better else TRIED + between)]
    assert set(chosen[2:-1]) == {(better, between), (not better, TRIED)}


@pytest.mark.parametrize(("looking", "goes_on"), [(1.01, True), (1.05, False)])
def test_looking_that_finds_nothing_goes_on_where_it_costs_next_to_nothing(looking: float, goes_on: bool) -> None:
    """Random text: what a step of 25 ms hides, one of a millisecond shows."""
    chosen = play(AdaptiveDepth(MOST, CHEAP), 2000, 4, 1, looking)
    assert sum(chosen) > 0.85 * len(chosen) if goes_on else sum(chosen) < 0.15 * len(chosen)


@pytest.mark.parametrize(("seconds", "looks"), [(LONG / 4, False), (LONG * 2, True)])
def test_what_no_clock_can_tell_is_decided_by_what_was_gained(seconds: float, looks: bool) -> None:
    """Steps that look and find nothing seem no longer than the others: short ones are for the clock too coarse."""
    chosen = play(AdaptiveDepth(MOST, CHEAP), 2000, 4, 1, seconds, seconds)
    assert sum(chosen) > 0.85 * len(chosen) if looks else sum(chosen) < 0.15 * len(chosen)


def test_short_steps_go_on_with_drafts_that_bring_something() -> None:
    chosen = play(AdaptiveDepth(MOST, CHEAP), 2000, 4, 2, LONG / 4, LONG / 4)
    assert sum(chosen) > 0.85 * len(chosen)


@pytest.mark.parametrize(("drafting", "between"), [(1.5, round(TRIED * 0.5 / LOSS)), (6.0, round(TRIED * 5 / LOSS))])
def test_dear_tries_are_seldom(drafting: float, between: int) -> None:
    """A draft head over a small model: it takes as long as several steps, in each of those that it is tried for."""
    chosen = stretches(play(AdaptiveDepth(MOST, CHEAP), 3 * SELDOM, 1, 1, drafting))
    assert chosen[1:3] == [(False, TRIED + RARELY), (True, TRIED)], "of the first steps it is not known what they lose"
    assert set(chosen[3:-1]) == {(False, min(between, SELDOM)), (True, TRIED)}


def test_tries_do_not_end_however_dear() -> None:
    chosen = stretches(play(AdaptiveDepth(MOST, CHEAP), 3 * SELDOM, 1, 1, 1000.0))
    assert set(chosen[3:-1]) == {(False, SELDOM), (True, TRIED)}


def test_what_paid_until_now_is_tried_again_soon() -> None:
    depth = AdaptiveDepth(MOST, CHEAP)
    play(depth, 2 * (FIRST + TRIED) + RARELY, 1, 3, 1.5)
    first, *others = stretches(play(depth, 1000, 1, 1, 1.5))
    assert first[0] and others[0] == (False, TRIED + RARELY)


def test_a_change_is_noticed() -> None:
    depth = AdaptiveDepth(MOST, CHEAP)
    play(depth, 2000, 1, 1, 1.5)
    assert sum(play(depth, 2 * RARELY + 200, 1, 4, 1.5)[-100:]) > 80


def test_numbers_of_rows_are_apart() -> None:
    """Drafts pay for few rows and not for many, and it stays known."""
    depth = AdaptiveDepth(MOST, CHEAP)
    play(depth, 400, 2, 3, 1.2)
    play(depth, 400, 32, 2, 4.0)
    assert sum(play(depth, 100, 3, 3, 1.2)) >= 100 - TRIED
    assert sum(play(depth, 100, 33, 2, 4.0)) <= TRIED


def test_steps_with_prompts_tell_nothing() -> None:
    depth = AdaptiveDepth(MOST, CHEAP)
    play(depth, 400, 2, 3, 1.5)
    for _ in range(500):
        depth.observe(replace(result(2, 100.0, 3), has_prompts=True))
        depth.observe(replace(result(2, 0.001, None), has_prompts=True))
    assert sum(play(depth, 200, 2, 3, 1.5)) >= 200 - TRIED


@pytest.mark.parametrize("first", [True, False])
def test_one_long_step_is_not_the_last(first: bool) -> None:
    """The process was stopped for a minute in a step that takes 1.5 seconds otherwise."""
    pace, minute = Pace(), [60.0]
    for seconds in (*minute * first, *[1.5] * 20, *minute * (not first)):
        pace.add(6, seconds)
    assert pace.outputs == 6 and pace.seconds == pytest.approx(1.5, rel=0.02)


def test_steps_that_are_interrupted_at_times_decide_nothing(seed: int) -> None:
    """One step in ten waits for another process ten times as long as it takes, whichever way is gone."""
    rng = np.random.default_rng(seed)
    for got, drafting, better in ((2, 1.5, True), (1, 1.15, False)):
        depth, chosen = AdaptiveDepth(MOST, CHEAP), []
        for _ in range(4000):
            chosen.append(depth.aim(1) is not NO_DRAFTS)
            seconds = (drafting if chosen[-1] else 1.0) * (10.0 if rng.random() < 0.1 else 1.0)
            depth.observe(result(1, seconds, got if chosen[-1] else None))
        assert (sum(chosen[1000:]) > 0.7 * 3000) == better


def test_what_steps_take_now_counts_most() -> None:
    pace = Pace()
    for seconds in (*[1.0] * 1000, *[2.0] * 200):
        pace.add(4, seconds)
    assert pace.seconds == pytest.approx(2.0, rel=0.05)


def test_a_draft_is_worth_the_tokens_that_its_time_would_bring() -> None:
    """63 tokens more take a tenth longer than one: a draft takes 1/630 of a step, in which there are two tokens."""
    depth = AdaptiveDepth(MOST, CHEAP)
    assert depth.aim(1).worth == pytest.approx(1 / 630, rel=0.01), "at first by what the model takes alone"
    depth.observe(result(1, 0.020, 2))
    assert depth.aim(1).worth == pytest.approx(2 / 630, rel=0.01)
    assert depth.aim(1).most == MOST
    assert AdaptiveDepth(MOST, CHEAP).aim(4).worth == pytest.approx(4 / 630, rel=0.05), "four rows bring four tokens"


def test_drafts_of_a_step_are_worth_the_tokens_that_verifying_takes_from_all_rows() -> None:
    """Steps take half as long again with drafts to verify, which four rows would bring two tokens in."""
    depth = AdaptiveDepth(MOST, CHEAP)
    for seconds, got in (*[(1.0, None)] * 50, *[(1.5, 3)] * 50):
        depth.observe(result(4, seconds, got))
    assert depth.aim(4).least == pytest.approx(2.0)
    assert depth.aim(1).least == 0.0, "of other numbers of rows nothing is known"


def test_steps_that_found_no_draft_do_not_say_what_verifying_takes() -> None:
    depth = AdaptiveDepth(MOST, CHEAP)
    for seconds, got, proposed in (*[(1.0, None, 0)] * 9, *[(1.5, 3, MOST)] * 9, *[(1.1, 1, 0)] * 50):
        depth.observe(result(4, seconds, got, proposed))
    assert depth.aim(4).least == pytest.approx(2.0)


def test_one_step_does_not_say_what_verifying_takes() -> None:
    depth = AdaptiveDepth(MOST, CHEAP)
    for seconds, got in (*[(1.0, None)] * 20, (1.5, 3)):
        depth.observe(result(4, seconds, got))
    assert depth.aim(4).least == 0.0


def test_verifying_that_was_dear_once_is_tried_again() -> None:
    """A drafter that is told so much of a cost proposes nothing, and no step shows that it is over."""
    depth = AdaptiveDepth(MOST, CHEAP)
    for _ in range(CERTAIN):
        depth.observe(result(1, 1.0, None))
        depth.observe(result(1, 9.0, 1))
    told = []
    for _ in range(20 * RARELY):
        if (aim := depth.aim(1)) is not NO_DRAFTS:
            told.append(aim.least)
            # A draft is expected to bring half a token, and verifying it takes a tenth of a step by now.
            depth.observe(result(1, 1.1, 2) if aim.least < 0.5 else result(1, 1.05, 1, 0))
        else:
            depth.observe(result(1, 1.0, None))
    assert told[0] == pytest.approx(8.0) and told[-1] == pytest.approx(0.1), told


def test_a_draft_need_not_be_certain() -> None:
    assert AdaptiveDepth(MOST, DEAR).aim(32).worth == HIGHEST
    assert AdaptiveDepth(MOST, CHEAP).aim(0).most == MOST, "the first step has no row yet"


def test_times_go_on_along_a_line() -> None:
    times = StepTimes((1, 2, 4), (1.0, 1.5, 2.5))
    assert [times.of(each) for each in (1, 1.5, 2, 3, 4, 6)] == [1.0, 1.25, 1.5, 2.0, 2.5, 3.5]
    assert StepTimes((1,), (1.0,)).of(9) == 1.0
