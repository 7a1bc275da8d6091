"""Which places a head runs over, and which tokens stand behind them."""

from __future__ import annotations

import numpy as np
import torch

from core.speculation.eagle_places import MOST_WAITING, HeadPlaces, Known, Waiting, behind_chunks


def places(*rows: tuple[int, int, int]) -> HeadPlaces:
    """Of each (row, first place, count); everything says which place of which row it is."""
    numbers = [100 * row + first + i for row, first, count in rows for i in range(count)]
    found, at = torch.tensor(numbers), torch.tensor([first + i for _, first, count in rows for i in range(count)])
    columns = [np.array(column) for column in zip(*rows, strict=True)]
    return HeadPlaces(*columns, found, found[:, None].float(), at, found)


def said(found: HeadPlaces) -> dict[int, list[int]]:
    """By row, its places; checks that all columns agree."""
    assert torch.equal(found.ids, found.slots) and torch.equal(found.ids, found.states[:, 0].long())
    ends = np.cumsum(found.counts)
    told = {}
    columns = (each.tolist() for each in (found.rows, ends, found.counts, found.prefixes))
    for row, end, count, first in zip(*columns, strict=True):
        told[row] = found.positions[end - count : end].tolist()
        assert told[row] == list(range(first, first + count))
        assert found.ids[end - count : end].tolist() == [100 * row + place for place in told[row]]
    return told


def test_what_waited_goes_before_what_comes() -> None:
    waiting = Waiting()
    waiting.add(places((3, 7, 1), (1, 20, 1)))
    waiting.add(places((1, 21, 2), (3, 8, 1)))
    assert said(waiting.before(places((1, 23, 1), (2, 5, 2)))) == {1: [20, 21, 22, 23], 2: [5, 6]}
    assert not waiting


def test_what_has_a_gap_behind_it_is_left_out() -> None:
    waiting = Waiting()
    waiting.add(places((1, 4, 2), (2, 9, 1)))
    waiting.add(places((1, 8, 1)))
    assert said(waiting.before(places((1, 9, 1), (2, 10, 1)))) == {1: [8, 9], 2: [9, 10]}


def test_other_owners_of_a_row_have_nothing_waiting() -> None:
    waiting = Waiting()
    waiting.add(places((1, 4, 1), (2, 9, 1)))
    waiting.forget(np.array([1]))
    assert said(waiting.before(places((1, 5, 1), (2, 10, 1)))) == {1: [5], 2: [9, 10]}


def test_the_oldest_are_forgotten_first() -> None:
    waiting = Waiting()
    for place in range(MOST_WAITING + 10):
        waiting.add(places((1, place, 1)))
    assert said(waiting.before(places((1, MOST_WAITING + 10, 1))))[1][0] == 10


def test_what_former_owners_left_takes_no_room_of_what_waits() -> None:
    waiting = Waiting()
    waiting.add(places((1, 0, MOST_WAITING - 1)))
    waiting.forget(np.array([1]))
    waiting.add(places((2, 0, MOST_WAITING)))
    assert said(waiting.before(places((2, MOST_WAITING, 1))))[2][0] == 0


def test_some_rows_can_be_taken() -> None:
    assert said(places((1, 4, 2), (2, 9, 1), (3, 0, 3)).of_rows(np.array([True, False, True]))) == {
        1: [4, 5],
        3: [0, 1, 2],
    }


def test_the_token_behind_a_chunk_is_that_of_the_prompt_or_the_sample() -> None:
    """Of a row that samples the sample; in the middle of a prompt that is drafted for the prompt's next token."""
    ids, sampled = np.array([10, 11, 12, 20, 21, 30, 40]), {5: 99, 8: 98}
    known = {6: Known(np.array([18, 19, 20, 21, 22, 23]), 0), 5: Known(np.array([10, 11, 12]), 0)}
    rows, prefixes, counts = np.array([5, 6, 7, 8]), np.array([0, 2, 3, 50]), np.array([3, 2, 1, 1])
    found = behind_chunks(ids, rows, prefixes, counts, sampled, known)
    assert found.tolist() == [11, 12, 99, 21, 22, 30, 98]
