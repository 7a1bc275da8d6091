"""Late guesses: the device shifts them to where a row stands, and drops those that did not foresee its newest token."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from core.batch.ragged import starts_of
from core.batch.spec_plan import NO_DRAFTS, SpecPlan, TextSeed
from core.speculation.drafter import Ran
from core.speculation.guesses import LateGuesses, far_enough
from core.speculation.suffix_drafter import SuffixDrafter

IDS = torch.tensor([[11, 12, 13, 14, 15, -1, -1]])


def drafts(newest: int, before: int, known: int = 6, width: int = 3) -> list[int]:
    late = LateGuesses(IDS, torch.tensor([5]), torch.tensor([known]))
    ids, lens = late.drafts(torch.tensor([newest]), torch.tensor([before]), width)
    assert ids.shape == (1, width)
    return ids[0, : int(lens[0])].tolist()


def test_a_host_that_knows_all_needs_no_proof() -> None:
    assert drafts(newest=9, before=5) == [11, 12, 13]


@pytest.mark.parametrize(("newest", "before", "left"), [(11, 6, [12, 13, 14]), (13, 8, [14, 15]), (15, 10, [])])
def test_what_was_sampled_meanwhile_is_left_out(newest: int, before: int, left: list[int]) -> None:
    assert drafts(newest, before) == left


@pytest.mark.parametrize(("newest", "before"), [(12, 6), (11, 8), (10, 6), (-1, 11), (-1, 12), (-1, 40), (15, 11)])
def test_a_guess_that_went_wrong_is_dropped(newest: int, before: int) -> None:
    assert drafts(newest, before) == []


def test_a_host_that_knows_more_than_there_is_guesses_nothing() -> None:
    """It cannot be, and must not be read from before the beginning."""
    assert drafts(newest=11, before=3) == []


def test_a_guess_reaches_over_a_step_that_got_all_its_drafts() -> None:
    assert far_enough(3) == 7
    late = LateGuesses(torch.arange(7)[None], torch.tensor([7]), torch.tensor([6]))
    ids, lens = late.drafts(torch.tensor([3]), torch.tensor([9]), 3)
    assert lens.tolist() == [3] and ids.tolist() == [[4, 5, 6]]


def begun(row: int, ids: list[int]) -> Any:
    seeds = (TextSeed(row, "", np.array(ids)),)
    nothing = np.empty(0, np.int64)
    return SimpleNamespace(fresh_rows=np.array([row]), spec=SpecPlan(nothing, nothing, NO_DRAFTS, seeds))


def test_the_index_guesses_what_followed_before() -> None:
    drafter = SuffixDrafter(1 << 20, 3)
    drafter.begin(begun(2, [*range(20, 40), 1, 2]))
    drafter.begin(begun(5, [7, 8, 9]))
    counts = np.array([1, 3])
    tokens = np.array([3, 21, 22, 23])
    assert starts_of(counts).tolist() == [0, 1]
    drafter.hear(Ran(np.array([2, 5]), np.array([22, 5]), counts, tokens))
    found = drafter.guess(np.array([5, 2, 4]), 7)
    assert found.ids[0].tolist() == list(range(24, 31)) and found.lens.tolist() == [7, 0, 0]
