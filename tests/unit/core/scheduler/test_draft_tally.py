"""What is counted of drafts is what happened: against a plain count of a few lines, whatever the steps were."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from core.batch.result import Accepted, StepResult
from core.histogram import Histogram
from core.scheduler.draft_tally import DraftTally
from core.types.stats import LENGTHS, DraftStats


def result(proposed: list[int], right: list[int], busy: float = 1.0, drafting: float = 0.25) -> StepResult:
    """A step in which row i had `proposed[i]` drafts, of which `right[i]` were right."""
    tried, counts = np.array(proposed, np.int64), np.array(right, np.int64) + 1
    nothing = np.empty(0, np.int64)
    accepted = Accepted(counts, tried, tried + 1)
    return StepResult(
        1, nothing, nothing, nothing, np.empty(0, np.bool_), busy=busy, drafting=drafting, accepted=accepted
    )


def test_counts_are_those_of_a_plain_count(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tally, steps, tried = DraftTally(), 0, list[tuple[int, int]]()
    for _ in range(60):
        proposed = rng.integers(0, rng.integers(1, 20), rng.integers(0, 6)).tolist()
        right = [int(rng.integers(0, count + 1)) for count in proposed]
        tally.step_done(result(proposed, right))
        steps += any(proposed)
        tried += [pair for pair in zip(proposed, right, strict=True) if pair[0]]
    stats = tally.stats()
    most = max(count for count, _ in tried)
    assert (stats.steps, stats.rows, stats.dropped) == (steps, len(tried), 0)
    assert (stats.tokens, stats.accepted) == (sum(count for count, _ in tried), sum(right for _, right in tried))
    assert stats.proposed_by_position == tuple(sum(count > i for count, _ in tried) for i in range(most))
    assert stats.accepted_by_position == tuple(sum(right > i for _, right in tried) for i in range(most))
    lengths = stats.lengths
    plain = Histogram(LENGTHS)
    plain.observe(np.array([right + 1.0 for _, right in tried]))
    assert lengths == plain.stats()
    assert stats.acceptance_length == pytest.approx(lengths.total / len(tried))
    assert stats.acceptance_rate == pytest.approx(stats.accepted / stats.tokens)


def test_steps_without_drafts_have_no_part_in_the_time_of_verifying() -> None:
    tally = DraftTally()
    tally.step_done(result([2, 0], [1, 0]))
    assert tally.stats().most == 2
    tally.step_done(result([0, 0], [0, 0]))
    tally.step_done(replace(result([], []), accepted=None, drafting=0.0))
    before = tally.stats()
    tally.step_done(replace(result([], []), accepted=None, drafting=0.0))
    tally.dropped(0)
    assert tally.stats() is before, "nothing has changed"
    tally.dropped(3)
    stats = tally.stats()
    assert (stats.steps, stats.most, stats.dropped) == (1, 0, 3)
    assert (stats.draft_seconds, stats.verify_seconds) == (0.5, 0.75)


def test_nothing_is_known_before_the_first_draft() -> None:
    stats = DraftTally().stats()
    assert (stats.tokens, stats.rows, stats.acceptance_rate, stats.acceptance_length) == (0, 0, 0.0, 0.0)
    assert stats.proposed_by_position == stats.accepted_by_position == DraftStats().accepted_by_position == ()
