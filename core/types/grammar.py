"""Compiled constraints as engine, scheduler and executor see them, whatever library compiled them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.int32]
"""One bit per token id, 32 to a word, the lowest id in the lowest bit; 1 allows the token."""


class Matcher(Protocol):
    """The state of one output in its grammar. Owned by one thread at a time."""

    def fill(self, words: Words) -> bool:
        """Set the bits of all tokens that may come next in `words`, int32[W] of zeros. Returns whether there is any.

        False also when the library gave up; `failure` then says why.
        """
        ...

    def accept(self, token: int) -> bool:
        """Move on past `token`. False if it was not allowed; only `failure` and `gave_up` may be read after that."""
        ...

    def fork(self) -> Matcher:
        """Another matcher in the same state, to look ahead with; what it accepts changes nothing here.

        A copy and not a way back: llguidance takes back no end token, and neither library what it failed at.
        """
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
        """Protobuf path of the constraint that it was compiled from, for error messages."""
        ...

    @property
    def words(self) -> int:
        """Length W of the masks of `Matcher.fill`, in words; even, and enough for every id of the model."""
        ...

    def matcher(self) -> Matcher:
        """A new matcher, before the first token of an output."""
        ...

    def accept_all(self, matchers: Sequence[Matcher], tokens: Sequence[int]) -> Sequence[bool]:
        """`Matcher.accept` of `tokens[i]` by `matchers[i]`, which may be of other grammars of the same library.

        Releases the GIL at most once.
        """
        ...

    def fill_all(self, matchers: Sequence[Matcher], words: Words) -> npt.NDArray[np.bool_]:
        """`Matcher.fill` of each of G matchers into its row of `words`, int32[G, W]; returns their answers, bool[G].

        Releases the GIL at most once: a step of 64 rows must not wait 64 times for a busy loop thread.
        """
        ...
