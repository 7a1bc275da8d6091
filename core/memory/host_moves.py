"""What the scheduler tells the forward thread of copies in host memory: plain arrays, decided with a step."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from core.types.arrays import Ints


@dataclass(frozen=True, slots=True, eq=False)
class HostCopy:
    """Keys and values of the first `tokens` tokens of a request, in `blocks`, int64[n], of host memory."""

    number: int
    tokens: int
    blocks: Ints


@dataclass(frozen=True, slots=True, eq=False)
class CopyOut:
    """Copy what `slots`, int64[tokens], hold into `copy`. They are leased until the copy has landed (law 4)."""

    copy: HostCopy
    slots: Ints
    dropped: tuple[int, ...] = ()
    """Numbers of copies that were given up since the copy before: none of them comes back."""


@dataclass(frozen=True, slots=True, eq=False)
class CopyBack:
    """`row` goes on behind the tokens of `copy`, as if it had decoded in the step before.

    The first `skip` tokens are on the device already; the others go to `slots`, int64[copy.tokens - skip].
    """

    copy: HostCopy
    row: int
    newest: int
    """The token behind those of the copy: what the row decodes next."""
    skip: int
    slots: Ints
    seat: Ints = field(init=False)
    """int64[3]: the row, how many tokens stand before its newest one, and that."""

    def __post_init__(self) -> None:
        # Made once: a step finds what it has sent by the identity of the array.
        object.__setattr__(self, "seat", np.array([self.row, self.copy.tokens, self.newest], np.int64))
