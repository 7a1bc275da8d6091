"""Grids: which places count, and what becomes of their drafts, as the ragged trial of the same drafts says."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from core.device.staging import Staging
from core.speculation.drafter import Drafts
from core.speculation.grid import Grid
from core.speculation.trial import Trial

VOCAB = 100
STAGING = Staging(torch.device("cpu"))
ROWS = [4, 2, 9]
"""Of the pool."""


def grid(lens: list[int], drafts: list[list[int]], room: list[int] | None = None) -> Grid:
    """Rows with newest tokens 10, 20, … behind `lens` tokens."""
    width = max(map(len, drafts))
    ids = torch.tensor([[*each, *[3] * (width - len(each))] for each in drafts])
    newest = 10 * torch.arange(1, len(lens) + 1)
    said = torch.tensor([len(each) for each in drafts])
    rows = torch.tensor(ROWS[: len(lens)])
    return Grid.of(rows, newest, torch.tensor(lens), (ids, said), torch.tensor(room or [width] * len(lens)), VOCAB)


def test_each_row_has_its_newest_token_its_drafts_and_places_that_do_not_count() -> None:
    found = grid([5, 0, 7], [[11, 12], [], [31]])
    assert found.tried.tolist() == [3, 1, 2] and found.counts.tolist() == [3, 3, 3]
    assert found.ids.tolist() == [[10, 11, 12], [20, 20, 20], [30, 31, 30]]
    assert found.positions.tolist() == [5, 6, 7, 0, 0, 0, 7, 8, 7]
    rows, positions, ids = found.entries(np.array(ROWS), STAGING)
    assert rows.tolist() == [4, 4, 4, 2, 0, 0, 9, 9, 0], "row 0 takes what has no place"
    assert (positions.tolist(), ids.tolist()) == (found.positions.tolist(), found.ids.view(-1).tolist())
    rows, lens = found.sampled_at(np.array(ROWS), STAGING)
    assert rows.tolist() == [4, 4, 4, 2, 0, 0, 9, 9, 0] and lens.tolist() == [6, 7, 8, 1, 1, 1, 8, 9, 8]


@pytest.mark.parametrize(("room", "tried"), [(-3, 1), (-1, 1), (0, 1), (1, 2), (2, 3), (9, 4)])
def test_no_row_tries_more_than_it_has_room_for(room: int, tried: int) -> None:
    assert grid([5], [[11, 12, 13]], [room]).tried.tolist() == [tried]


@pytest.mark.parametrize("foreign", [-1, VOCAB, 2**40])
def test_drafts_end_before_one_that_is_no_token(foreign: int) -> None:
    found = grid([5, 6, 7], [[11, foreign, 13], [foreign, 22, 23], [0, VOCAB - 1, 33]])
    assert found.tried.tolist() == [2, 1, 4]
    assert found.ids.tolist() == [[10, 11, 10, 10], [20, 20, 20, 20], [30, 0, VOCAB - 1, 33]]


def test_a_place_that_does_not_count_is_never_right() -> None:
    """It repeats the newest token, which may well be sampled again."""
    found = grid([5, 6], [[11, 12], []])
    judged = found.judge(torch.tensor([7, 1, 2, 20, 20, 20]), None, STAGING)
    outcome = judged.outcome.fetched(judged.outcome.on_device)
    assert outcome.counts.tolist() == [1, 1] and outcome.proposed.tolist() == [2, 0]
    assert judged.newest.tolist() == [7, 20] and judged.lens.tolist() == [6, 7]


def test_it_is_as_the_ragged_trial_says(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(200):
        rows, width = int(rng.integers(1, 6)), int(rng.integers(1, 5))
        ids, room = rng.integers(-1, 4, (rows, width)), rng.integers(-1, width + 2, rows)
        lens, newest, before = rng.integers(0, width + 1, rows), rng.integers(0, 4, rows), rng.integers(0, 50, rows)
        ragged = Trial.of(newest, before, Drafts(ids, lens), room, VOCAB)
        said = torch.from_numpy(ids), torch.from_numpy(lens)
        places = torch.from_numpy(newest), torch.from_numpy(before)
        found = Grid.of(torch.arange(1, rows + 1), *places, said, torch.from_numpy(room), VOCAB)
        assert found.tried.tolist() == ragged.counts.tolist()
        real = found.mask.view(-1).numpy()
        assert found.ids.view(-1).numpy()[real].tolist() == ragged.ids.tolist()
        assert found.positions.numpy()[real].tolist() == ragged.positions.tolist()
        sampled = rng.integers(0, 4, len(real))
        mine = found.judge(torch.from_numpy(sampled), None, STAGING)
        theirs = ragged.judge(torch.from_numpy(sampled[real]), None, STAGING)
        assert mine.lens.tolist() == theirs.lens.tolist() and mine.newest.tolist() == theirs.newest.tolist()
        one, other = mine.outcome, theirs.outcome
        assert one.counts.tolist() == other.counts.tolist() and one.proposed.tolist() == other.proposed.tolist()
        assert sampled[one.kept].tolist() == sampled[real][other.kept].tolist()
        assert one.starts.tolist() == (np.arange(rows) * (width + 1)).tolist()
