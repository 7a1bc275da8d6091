"""Rows that decode are dealt out among the steps of a pipeline: each once in as many steps as there are ranks."""

from __future__ import annotations

import numpy as np
import pytest

from core.scheduler.microbatches import Microbatches

ROWS = 33


def play(stages: int, count: int, steps: int, in_flight: int = 0) -> list[list[int]]:
    """The rows of each step; `count` rows decode."""
    dealt, found = Microbatches(stages, ROWS), []
    rows = np.arange(1, count + 1)
    for step in range(1, steps + 1):
        due = dealt.due(rows, step, in_flight)
        dealt.planned(due, step)
        found.append(due.tolist())
    return found


def test_an_engine_of_one_rank_decodes_all_rows_in_each_step() -> None:
    assert play(1, 5, 3, in_flight=9) == [[1, 2, 3, 4, 5]] * 3


@pytest.mark.parametrize(("stages", "count"), [(2, 8), (2, 7), (3, 9), (3, 10), (4, 5)])
def test_each_row_decodes_once_in_as_many_steps_as_there_are_ranks(stages: int, count: int) -> None:
    found = play(stages, count, 4 * stages, in_flight=stages)
    for at in range(0, len(found), stages):
        assert sorted(row for step in found[at : at + stages] for row in step) == list(range(1, count + 1))
    sizes = [len(each) for each in found]
    assert max(sizes) == -(-count // stages)
    assert all(found[at] == found[at + stages] for at in range(len(found) - stages))


@pytest.mark.parametrize("in_flight", [0, 1, 2])
def test_with_fewer_rows_than_ranks_a_step_waits_as_in_an_engine_of_one_rank(in_flight: int) -> None:
    dealt, rows = Microbatches(3, ROWS), np.array([4])
    dealt.planned(rows, 7)
    for step in (8, 9):
        assert dealt.due(rows, step, in_flight).tolist() == ([4] if in_flight < 2 else [])
    assert dealt.due(rows, 10, in_flight).tolist() == [4]


def test_rows_that_are_all_away_come_in_the_order_in_which_they_left() -> None:
    dealt, rows = Microbatches(2, ROWS), np.array([1, 2, 3, 4])
    dealt.planned(np.array([3, 4]), 5)
    dealt.planned(np.array([1, 2]), 6)
    assert dealt.due(rows, 6, in_flight=1).tolist() == [3, 4]
    assert dealt.due(rows, 7, in_flight=2).tolist() == [3, 4]
    # Those of step 6 may not decode before step 8.
    assert dealt.due(np.array([1, 2]), 7, in_flight=2).tolist() == []


def test_where_all_are_away_only_those_that_left_first_come() -> None:
    dealt = Microbatches(2, ROWS)
    dealt.planned(np.array([3]), 5)
    dealt.planned(np.array([1, 2]), 6)
    assert dealt.due(np.array([1, 2, 3]), 6, in_flight=1).tolist() == [3]


def test_steps_become_equal_again_when_requests_end() -> None:
    dealt, rows = Microbatches(2, ROWS), np.arange(1, 9)
    for step in (1, 2):
        dealt.planned(dealt.due(rows, step, 2), step)
    left = np.array([1, 2, 3, 4, 8])  # of the four of step 2 three have ended
    sizes = []
    for step in range(3, 9):
        due = dealt.due(left, step, 2)
        dealt.planned(due, step)
        sizes.append(len(due))
    assert sizes == [3, 2, 3, 2, 3, 2]


def test_the_oldest_go_first_where_more_are_ready_than_a_step_takes() -> None:
    dealt, rows = Microbatches(2, ROWS), np.array([1, 2, 3, 4])
    for row, step in ((1, 4), (2, 2), (3, 3), (4, 1)):
        dealt.planned(np.array([row]), step)
    # In their own order, but by when they were planned last.
    assert dealt.due(rows, 9, 0).tolist() == [2, 4]
    assert dealt.due(rows[:0], 9, 0).tolist() == []
