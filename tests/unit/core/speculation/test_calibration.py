"""A drafter's own probabilities are corrected by what came."""

from __future__ import annotations

import pytest

from core.speculation.calibration import Calibration


def test_at_first_the_drafter_is_believed() -> None:
    calibration = Calibration(2)
    assert calibration.chance(0, 0.99) == pytest.approx(0.94, abs=0.01)
    assert calibration.chance(1, 0.01) == pytest.approx(0.06, abs=0.01)
    assert calibration.chance(0, float("nan")) == calibration.chance(0, 0.0)


def test_it_learns_what_a_probability_is_worth() -> None:
    calibration = Calibration(2)
    for _ in range(400):
        calibration.judge(0, [0.5], [7], [7, 8])
    assert calibration.chance(0, 0.5) > 0.95
    assert calibration.chance(0, 0.9) == pytest.approx(0.94, abs=0.01)
    assert calibration.chance(1, 0.5) == pytest.approx(0.56, abs=0.01)


def test_behind_the_first_wrong_draft_nothing_is_learned() -> None:
    calibration = Calibration(1)
    for _ in range(400):
        calibration.judge(0, [0.9, 0.2], [7, 8], [6, 8])
    assert calibration.chance(0, 0.9) < 0.1
    assert calibration.chance(0, 0.2) == pytest.approx(0.19, abs=0.01)
