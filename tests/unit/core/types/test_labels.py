"""Scores of numbers of any size: finite, shares that sum to one, and sigmoids at their limits."""

from __future__ import annotations

import numpy as np
import pytest

from core.types.labels import Activation

NUMBERS = np.array([[3e38, -3e38, 0.0], [1.0, 2.0, 3.0]], np.float32)


@pytest.mark.parametrize("activation", Activation)
def test_scores_are_finite_float32(activation: Activation) -> None:
    with np.errstate(all="ignore"):
        scores = activation(NUMBERS)
    assert scores.dtype == np.float32 and scores.shape == NUMBERS.shape and np.isfinite(scores).all()


def test_what_they_are() -> None:
    np.testing.assert_allclose(
        Activation.SOFTMAX(NUMBERS), [[1, 0, 0], np.exp([1, 2, 3]) / np.exp([1, 2, 3]).sum()], 1e-6
    )
    np.testing.assert_allclose(Activation.SIGMOID(NUMBERS), [[1, 0, 0.5], 1 / (1 + np.exp([-1, -2, -3]))], 1e-6)
    np.testing.assert_array_equal(Activation.NONE(NUMBERS), NUMBERS)
