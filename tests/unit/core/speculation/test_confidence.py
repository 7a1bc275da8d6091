"""What is known of guesses: how likely each place is, judged by what came."""

from __future__ import annotations

import numpy as np

from core.speculation.confidence import HOPE, HOPED, Confidence

MOST = 4


def test_nothing_is_known_at_first_but_hope() -> None:
    assert Confidence(2, MOST).worthwhile(1, MOST, 0.5) == 3, "0.8, 0.64, 0.51"


def test_a_guess_is_as_long_as_it_is_found() -> None:
    assert Confidence(1, MOST).worthwhile(0, 1, 0.1) == 1
    assert Confidence(1, MOST).worthwhile(0, 0, 0.1) == 0


def test_what_is_known_is_what_came(seed: int) -> None:
    """Places are right with chances of their own; the cut falls where their product does."""
    rng, chances = np.random.default_rng(seed), (0.95, 0.5, 0.1)
    known = Confidence(1, MOST)
    for _ in range(3000):
        known.judge(0, [1] * 3, [int(rng.random() < chance) for chance in chances])
    products = np.cumprod(chances)
    for number in (1, 2):
        between = float((products[number - 1] + products[number]) / 2)
        assert known.worthwhile(0, 3, between) == number, products


def test_a_kind_is_judged_for_itself() -> None:
    known = Confidence(2, MOST)
    for _ in range(200):
        known.judge(0, [1] * MOST, [2])
        known.judge(1, [1] * MOST, [1] * MOST)
    assert known.worthwhile(0, MOST, 0.1) == 0
    assert known.worthwhile(1, MOST, 0.9) == MOST


def test_nothing_is_said_of_places_that_did_not_come_or_stand_behind_a_wrong_one() -> None:
    known = Confidence(1, MOST)
    for _ in range(400):
        known.judge(0, [1, 1, 1, 1], [1])
        known.judge(0, [1, 1, 1, 1], [1, 2, 1, 1])
    # The first place is always right, the second never; of the others hope is all there is.
    assert known.worthwhile(0, MOST, 0.01) == 1
    assert known._right[0][2:] == [HOPE, HOPE] and known._seen[0][2:] == [HOPED, HOPED]


def test_what_changes_is_learned_anew() -> None:
    known = Confidence(1, 1)
    for _ in range(5000):
        known.judge(0, [1], [2])
    for _ in range(150):
        known.judge(0, [1], [1])
    assert known.worthwhile(0, 1, 0.8) == 1
