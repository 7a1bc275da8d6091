"""Constraints of a step: the matchers that start with it, and the masks and statuses of its constrained rows."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np

from core.types.arrays import Ints
from core.types.grammar import Grammar, Words


@dataclass(frozen=True, slots=True)
class GrammarSeed:
    """A constrained request that got row `row`: its grammar, and int64[n] outputs it has already (after retraction)."""

    row: int
    generation: int
    grammar: Grammar
    outputs: Ints


UNCONSTRAINED: Final = np.iinfo(np.int64).max
"""Places of a row that has no constraint."""


class GrammarStatus(IntEnum):
    """The state of one sampling row's constraint. The row's token means something only where it is OPEN."""

    OPEN = 0
    COMPLETE = 1
    """The constraint is met, nothing can follow, and the model has no end-of-sequence token to say so."""
    FAILED = 2
    """No token is allowed."""
    TOO_COMPLEX = 3
    """The grammar library gave up, or the request has used up the processor time that its constraint may cost."""
    CROWDED = 4
    """The constraints of all requests together cost too much now, and this one is among the most costly."""


@dataclass(frozen=True, slots=True)
class TokenMask:
    """Tokens allowed in some of S sampling rows."""

    places: Ints
    """int64[G], ascending: the constrained ones of the S rows."""
    words: Words
    """int32[G, W], one bit per token; W is even and at least vocab / 32. A bit of 1 allows the token."""


@dataclass(frozen=True, slots=True)
class StepGrammars:
    """The answer of the grammars for one step, once the tokens before it are known."""

    mask: TokenMask
    status: np.ndarray
    """int8[S] of GrammarStatus."""
    masked: Ints | None = None
    """int64[S]: at how many places of each row a token may count, UNCONSTRAINED where no mask limits them. None where
    each row has one place."""
