"""What compiled constraints look like to the floors between the library that made them and the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.int32]
"""Bits of token ids, 32 to a word, the lowest first; 1 allows a token."""


class Matcher(Protocol):
    """Where one output stands in its grammar. Owned by one thread at a time."""

    def fill(self, words: Words) -> bool:
        """Set in `words` (zeros, int32[W]) the bits of all tokens that may come next; whether any may.

        False also when the library gave up: see `failure`.
        """
        ...

    def accept(self, token: int) -> bool:
        """Go on behind `token`; False if it was not allowed, after which only `failure` can be asked."""
        ...

    def rollback(self, count: int) -> None:
        """Take the last `count` accepted tokens back."""
        ...

    @property
    def is_terminated(self) -> bool:
        """Whether the output is complete and no text can follow; an end-of-sequence token still may."""
        ...

    @property
    def failure(self) -> str | None:
        """Why the library cannot go on; None while it can."""
        ...

    @property
    def gave_up(self) -> bool:
        """Whether `failure` is a limit of the library's own work, and not a token that was not allowed."""
        ...


class Grammar(Protocol):
    """A compiled constraint, shared by all requests that ask for it; `matcher` may be called from any thread."""

    @property
    def field(self) -> str:
        """See `Constraint.field`, of the constraint that it was compiled from."""
        ...

    @property
    def words(self) -> int:
        """Words that `Matcher.fill` needs; even, and enough for every id of the model."""
        ...

    def matcher(self) -> Matcher:
        """A matcher at the start."""
        ...

    def accept_all(self, matchers: Sequence[Matcher], tokens: Sequence[int]) -> Sequence[bool]:
        """`Matcher.accept` of each, also of other grammars of this library; the GIL is given away once at most."""
        ...

    def fill_all(self, matchers: Sequence[Matcher], words: Words) -> npt.NDArray[np.bool_]:
        """`Matcher.fill` of each into its row of int32[G, W]; bool[G]. The GIL is given away once at most.

        A step of 64 rows must not wait 64 times until a busy loop thread gives it back.
        """
        ...
