"""Drafts of a model as they come: how far each row's are worth a place, and whether all together are worth a step."""

from __future__ import annotations

import numpy as np
import pytest

from core.speculation.model_drafter import Said


def said() -> Said:
    """Of two rows the first gets two drafts that are likely, the second one that is not."""
    drafts, both = Said(np.arange(2), 3, np.zeros(2, np.bool_)), np.arange(2)
    assert drafts.take(0, both, np.array([5, 6]), np.full(2, 0.5), np.array([0.9, 0.3]), 0.4).tolist() == [True, False]
    assert drafts.take(1, both[:1], np.array([7]), np.full(1, 0.5), np.array([0.8]), 0.4).tolist() == [True]
    return drafts


def test_drafts_end_before_one_that_is_not_worth_its_place() -> None:
    drafts = said().drafts(0.0)
    assert drafts.lens.tolist() == [2, 0] and drafts.ids[0, :2].tolist() == [5, 7]


@pytest.mark.parametrize(("least", "lens"), [(1.6, [2, 0]), (1.7, [0, 0])])
def test_drafts_that_together_bring_less_than_verifying_costs_are_left_out(least: float, lens: list[int]) -> None:
    """0.9 + 0.9 * 0.8 of them are expected to be right."""
    assert said().drafts(least).lens.tolist() == lens


def test_what_was_left_out_is_judged_all_the_same() -> None:
    drafts = said()
    drafts.drafts(9.0)
    assert [(place, guess.ids) for place, guess in drafts.guesses()] == [(0, [5, 7]), (1, [6])]
