"""What a model that judges texts has to say of each: its labels, and what its numbers for them mean."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

import numpy as np
import numpy.typing as npt


class Activation(Enum):
    """How the numbers of a head become scores: shares of one, each for itself in 0..1, or as they are."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    NONE = "none"

    def __call__(self, numbers: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """float32[..., L] of the same shape. Computed in float64: no number overflows."""
        return _SCORES[self](numbers.astype(np.float64)).astype(np.float32)


def _softmax(numbers: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    powers = np.exp(numbers - numbers.max(axis=-1, keepdims=True))
    shares: npt.NDArray[np.float64] = powers / powers.sum(axis=-1, keepdims=True)
    return shares


def _sigmoid(numbers: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    # Powers of numbers below 0 only.
    small = np.exp(-np.abs(numbers))
    return np.where(numbers >= 0, 1 / (1 + small), small / (1 + small))


def _as_they_are(numbers: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return numbers


_SCORES: Final = {Activation.SOFTMAX: _softmax, Activation.SIGMOID: _sigmoid, Activation.NONE: _as_they_are}


@dataclass(frozen=True, slots=True)
class Labels:
    """The labels of a model, in the order of its numbers.

    `relevance`: the label whose score says how well the two texts of a pair belong together, for rerankers; None for
    models of several labels of which none says that.
    """

    names: tuple[str, ...]
    activation: Activation
    relevance: int | None = None
