"""What is known of guesses: how likely each place is, judged by what came."""

from __future__ import annotations

import numpy as np

from core.speculation.confidence import HOPE, HOPED, Confidence

MOST = 4


def test_nothing_is_known_at_first_but_hope() -> None:
    assert Confidence(2, MOST).prospect(1, MOST, 0.5).number == 3, "0.8, 0.64, 0.51"


def test_a_guess_is_as_long_as_it_is_found() -> None:
    assert Confidence(1, MOST).prospect(0, 1, 0.1).number == 1
    assert Confidence(1, MOST).prospect(0, 0, 0.1).number == 0


def test_what_is_known_is_what_came(seed: int) -> None:
    """Places are right with chances of their own; the cut falls where their product does."""
    rng, chances = np.random.default_rng(seed), (0.95, 0.5, 0.1)
    known = Confidence(1, MOST)
    for _ in range(3000):
        known.judge(0, [1] * 3, [int(rng.random() < chance) for chance in chances])
    products = np.cumprod(chances)
    for number in (1, 2):
        between = float((products[number - 1] + products[number]) / 2)
        assert known.prospect(0, 3, between).number == number, products


def test_expected_is_the_sum_of_the_chances_of_what_is_worth_a_place(seed: int) -> None:
    rng, chances = np.random.default_rng(seed), (0.9, 0.6, 0.5)
    known = Confidence(1, MOST)
    for _ in range(3000):
        known.judge(0, [1] * 3, [int(rng.random() < chance) for chance in chances])
    products, (number, right) = np.cumprod(known._right[0]), known.prospect(0, 3, 0.4)
    assert number == 2 and right == sum(products[:2])
    assert known.prospect(0, 1, 0.4) == (1, products[0])
    assert known.prospect(0, 3, 0.99) == (0, 0.0)


def test_a_kind_is_judged_for_itself() -> None:
    known = Confidence(2, MOST)
    for _ in range(200):
        known.judge(0, [1] * MOST, [2])
        known.judge(1, [1] * MOST, [1] * MOST)
    assert known.prospect(0, MOST, 0.1).number == 0
    assert known.prospect(1, MOST, 0.9).number == MOST


def test_nothing_is_said_of_places_that_did_not_come_or_stand_behind_a_wrong_one() -> None:
    known = Confidence(1, MOST)
    for _ in range(400):
        known.judge(0, [1, 1, 1, 1], [1])
        known.judge(0, [1, 1, 1, 1], [1, 2, 1, 1])
    # The first place is always right, the second never; of the others hope is all there is.
    assert known.prospect(0, MOST, 0.01).number == 1
    assert known._right[0][2:] == [HOPE, HOPE] and known._seen[0][2:] == [HOPED, HOPED]


def test_what_changes_is_learned_anew() -> None:
    known = Confidence(1, 1)
    for _ in range(5000):
        known.judge(0, [1], [2])
    for _ in range(150):
        known.judge(0, [1], [1])
    assert known.prospect(0, 1, 0.8).number == 1
