"""How much processor time following a constraint may take: a budget for each output, and one for all together.

A step waits for the masks of its constrained rows, so a grammar that is cheap to send and costly to follow could delay
all other requests. A budget counts processor time of the thread that works on one row; that clock stands still while
the host has no core for the thread. The libraries' own units leave out what costs most: llguidance takes 300 ms for a
mask of 10,000 items of an ambiguous grammar, and 1 ms for as many of others; xgrammar counts nothing.
"""

from __future__ import annotations

from collections.abc import Callable

FREE_SECONDS = 2e-4
FREE_SECONDS_PER_TOKEN = 4e-8
"""Free seconds of a step, per token of the vocabulary: 0.2 ms at 700 tokens, 1.5 ms at 32,000, 5 ms at 128,000. A token
of a JSON schema takes a tenth of that. Without a short cut, for instance near the `maxLength` of a string, a library
looks at every token of the vocabulary."""
BURST_SECONDS = 0.025
BURST_SECONDS_PER_TOKEN = 1e-6
"""Seconds beyond the free ones, for one output, and as many for all together; the first masks of a schema need some."""
DEAR = 1 / 16
"""Share of its burst: a row that has used more may be ended when the shared budget is used up."""
SHARED_RATE = 0.1
"""Seconds that the shared budget regains per second of wall time."""


def free_seconds(words: int) -> float:
    """Seconds of processor time that one output may take in each step for free; `words`: length of its masks."""
    return FREE_SECONDS + FREE_SECONDS_PER_TOKEN * 32 * words


def burst_seconds(words: int) -> float:
    """Seconds of processor time beyond the free ones that a budget has at first; `words`: length of the masks."""
    return BURST_SECONDS + BURST_SECONDS_PER_TOKEN * 32 * words


class RowBudget:
    """The budget of one output."""

    __slots__ = ("_burst", "_free", "is_heavy", "left")

    def __init__(self, words: int) -> None:
        self._free = free_seconds(words)
        self.left = self._burst = burst_seconds(words)
        """Seconds; below 0 the output has to end."""
        self.is_heavy = False
        """Whether its newest step took more than the free seconds."""

    def spend(self, seconds: float) -> float:
        """Charge `seconds` of work in one step; returns the seconds that were not free."""
        self.left = min(self._burst, self.left + self._free - seconds)
        extra = max(0.0, seconds - self._free)
        self.is_heavy = extra > 0.0
        return extra

    @property
    def is_dear(self) -> bool:
        """Whether it has used more than `DEAR` of its burst, too much for a short disturbance of the machine."""
        return self.left < self._burst * (1 - DEAR)


class SharedBudget:
    """The budget of all outputs of an engine, beyond free seconds: a burst, which refills by `SHARED_RATE`."""

    def __init__(self, words: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._at = clock()
        self.left = self._burst = burst_seconds(words)

    def refill(self) -> None:
        """Add what was regained since the last call; called once a step."""
        now = self._clock()
        self.left = min(self._burst, self.left + SHARED_RATE * (now - self._at))
        self._at = now

    def spend(self, extra: float) -> None:
        """Charge `extra` seconds, as returned by `RowBudget.spend`."""
        self.left -= extra
