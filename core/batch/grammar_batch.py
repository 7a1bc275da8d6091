"""Constraints of a step: matchers that start with it, and what became of those it asked."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

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


class GrammarStatus(IntEnum):
    """Of one sampling row. Only of OPEN ones does the token mean anything."""

    OPEN = 0
    COMPLETE = 1
    """The constraint is met, nothing can follow, and the model has no end-of-sequence token to say so."""
    FAILED = 2
    """No token is allowed."""
    TOO_COMPLEX = 3
    """The library gave up, or the request has used up what following its constraint may cost."""
    CROWDED = 4
    """The constraints of all requests cost too much at this moment, and this one's are among the dearest."""


@dataclass(frozen=True, slots=True)
class TokenMask:
    """Tokens allowed in some of S sampling rows."""

    places: Ints
    """int64[G], rising: which of the S rows."""
    words: Words
    """int32[G, W], W even and at least vocab / 32; 1 allows."""


@dataclass(frozen=True, slots=True)
class StepGrammars:
    """What the grammars say to one step, once the tokens before it are known."""

    mask: TokenMask
    status: np.ndarray
    """int8[S] of GrammarStatus."""
