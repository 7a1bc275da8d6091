"""The one random number of a row: a hash of its seed and output position, so nothing is drawn and nothing is stored.

A counter-based generator in the manner of SplitMix64 (Steele, Lea, Flood 2014): the seed is mixed once into a random
start, the position counts gammas from there, and the sum is mixed again. Law 13 follows: the number depends on the
request alone, not on the batch, the step, a preemption or the order of arrival. Not meant for secrets.

The start is made when a request gets its row. The numbers are made with the plan of each step, for every length that a
row may have then; `core.sampling.places` picks one of them where the length is known (law 7).
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from core.types.arrays import Ints

_GAMMA: Final = 0x9E3779B97F4A7C15
_INDEX_GAMMA: Final = 0xD1342543DE82EF95
_MIX_1: Final = 0xBF58476D1CE4E5B9
_MIX_2: Final = 0x94D049BB133111EB
_WORD: Final = 2**64 - 1


def origin(seed: int, prompt_len: int) -> int:
    """Where the counter of a request stands at length 0, for `uniforms`: a whole number in [-2^63, 2^63).

    Output 0 stands at length `prompt_len`, in tokens. So the counter begins as far before the mixed seed.
    """
    return _signed(_mixed(seed + _GAMMA) + (1 - prompt_len) * _GAMMA)


def uniforms(origins: Ints, lens: Ints) -> npt.NDArray[np.float64]:
    """float64 in [0, 1) with 53 random bits, for tokens at `lens` of sequences with these `origins`.

    int64 arrays that broadcast to the shape of the answer.
    """
    # Sums and products of int64 wrap around, as those of unsigned words do.
    words = lens * _signed(_GAMMA) + origins
    words = (words ^ _shifted(words, 30)) * _signed(_MIX_1)
    words = (words ^ _shifted(words, 27)) * _signed(_MIX_2)
    return _shifted(words ^ _shifted(words, 31), 11).astype(np.float64) * 2.0**-53


def derive_seed(seed: int, index: int) -> int:
    """The seed of output `index` of a request with `n` > 1; output 0 keeps the request's own seed.

    Both in and out are in [0, 2^63). Output 0 is therefore the same whether a client asks for one output or for many.
    """
    assert 0 <= seed < 2**63, seed
    assert index >= 0, index
    if index == 0:
        return seed
    return _mixed(_mixed(seed + _INDEX_GAMMA) + index * _INDEX_GAMMA) & (2**63 - 1)


def _mixed(word: int) -> int:
    """SplitMix64's finaliser, a bijection on 64 bits, of `word` modulo 2^64."""
    word &= _WORD
    word = (word ^ (word >> 30)) * _MIX_1 & _WORD
    word = (word ^ (word >> 27)) * _MIX_2 & _WORD
    return word ^ (word >> 31)


def _signed(word: int) -> int:
    """The number in [-2^63, 2^63) with the bits of `word` modulo 2^64."""
    word &= _WORD
    return word - 2**64 if word >= 2**63 else word


def _shifted(words: Ints, bits: int) -> Ints:
    """`words` shifted right with zeros coming in, as unsigned words are."""
    shifted: Ints = (words >> bits) & (2 ** (64 - bits) - 1)
    return shifted
