"""What the scheduler tells the forward thread of copies in host memory: plain arrays, decided with a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from core.types.arrays import Ints


@dataclass(frozen=True, slots=True, eq=False)
class HostCopy:
    """Keys and values of `tokens` tokens that follow one another, in `blocks`, int64[n], of host memory."""

    number: int
    tokens: int
    blocks: Ints
    beside: tuple[int, ...] = ()
    """Behind the keys: how many slots of each pool that rows hold something of beside them, in the arena's order."""


@dataclass(frozen=True, slots=True, eq=False)
class CopyOut:
    """Copy what `slots`, int64[n], hold into `copies`, one behind the other: n tokens in all.

    The slots are leased until the copies have landed (law 4). Without any slots nothing is copied: when it has landed,
    no step that was submitted before reads the blocks any more, so that another engine's bytes may be written there.
    """

    copies: tuple[HostCopy, ...]
    slots: Ints
    dropped: tuple[int, ...] = ()
    """Numbers of copies that were given up since the copy before: none of them comes back."""
    beside: tuple[Ints, ...] = ()
    """int64[n] each: slots of pools beside the keys, of the one copy. Nothing leases them: they are read on the forward
    stream, before a later step writes there."""

    @property
    def number(self) -> int:
        """By which its landing is told."""
        return self.copies[0].number


@dataclass(frozen=True, slots=True, eq=False)
class CopyBack:
    """Of the tokens of `copies`, one behind the other, those behind the first `skip` go to `slots`, int64[n]."""

    copies: tuple[HostCopy, ...]
    skip: int
    slots: Ints
    beside: tuple[Ints, ...] = field(default=(), kw_only=True)
    """int64[n] each: where what the one copy has of pools beside the keys goes, or the last n slots of it."""

    @property
    def arrays(self) -> tuple[Ints, ...]:
        """What is uploaded."""
        return (self.slots, *self.beside)


@dataclass(frozen=True, slots=True, eq=False)
class Rejoined(CopyBack):
    """`row` goes on behind the tokens of its one copy, as if it had decoded in the step before."""

    row: int
    newest: int
    """The token behind those of the copy: what the row decodes next."""
    seat: Ints = field(init=False)
    """int64[3]: the row, how many tokens stand before its newest one, and that."""

    def __post_init__(self) -> None:
        # Made once: a step finds what it has sent by the identity of the array.
        object.__setattr__(self, "seat", np.array([self.row, self.copies[0].tokens, self.newest], np.int64))

    @property
    def arrays(self) -> tuple[Ints, ...]:
        return (self.seat, self.slots)


@dataclass(frozen=True, slots=True)
class Part:
    """Tokens [first, first + count) of `copy`, which are the tokens from `at` on of a move."""

    copy: HostCopy
    first: int
    count: int
    at: int


def parts(copies: Sequence[HostCopy], begin: int, end: int) -> Iterator[Part]:
    """Of tokens [begin, end) of `copies`, one behind the other, what lies in each; `at` counts from `begin`."""
    before = 0
    for copy in copies:
        low, high = max(begin, before), min(end, before + copy.tokens)
        if low < high:
            yield Part(copy, low - before, high - low, low - begin)
        before += copy.tokens
