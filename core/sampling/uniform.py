"""The one random number of a row: a hash of its seed and output position, so nothing is drawn and nothing is stored.

A counter-based generator in the manner of SplitMix64 (Steele, Lea, Flood 2014): the seed is mixed once into a random
start, the position counts gammas from there, and the sum is mixed again. Law 13 follows: the number depends on the
request alone, not on the batch, the step, a preemption or the order of arrival. Not meant for secrets.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from core.types.arrays import Ints

_GAMMA: Final = np.uint64(0x9E3779B97F4A7C15)
_INDEX_GAMMA: Final = np.uint64(0xD1342543DE82EF95)
_MIX_1: Final = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2: Final = np.uint64(0x94D049BB133111EB)
_SEED_MASK: Final = np.uint64(2**63 - 1)


def uniforms(seeds: Ints, positions: Ints) -> npt.NDArray[np.float64]:
    """float64[S] in [0, 1) with 53 random bits, for int64[S] seeds and int64[S] output positions (any sign)."""
    assert seeds.shape == positions.shape, (seeds.shape, positions.shape)
    start = _mix(_words(seeds) + _GAMMA)
    word = _mix(start + (_words(positions) + np.uint64(1)) * _GAMMA)
    return (word >> np.uint64(11)).astype(np.float64) * 2.0**-53


def derive_seed(seed: int, index: int) -> int:
    """The seed of output `index` of a request with `n` > 1; output 0 keeps the request's own seed.

    Both in and out are in [0, 2^63). Output 0 is therefore the same whether a client asks for one output or for many.
    """
    assert 0 <= seed < 2**63, seed
    assert index >= 0, index
    if index == 0:
        return seed
    counter = np.array([index], np.uint64) * _INDEX_GAMMA
    word = _mix(_mix(np.array([seed], np.uint64) + _INDEX_GAMMA) + counter)
    return int(word[0] & _SEED_MASK)


def _words(values: Ints) -> npt.NDArray[np.uint64]:
    return np.ascontiguousarray(values, np.int64).view(np.uint64)


def _mix(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's finaliser, a bijection on 64 bits. Arrays only: numpy warns when a scalar wraps around."""
    words = (words ^ (words >> np.uint64(30))) * _MIX_1
    words = (words ^ (words >> np.uint64(27))) * _MIX_2
    return words ^ (words >> np.uint64(31))
