"""What following a constraint may cost, in processor time: each output has some, and all together have little more.

A step of other requests waits for the masks of those that are constrained, so a grammar that is cheap to send and dear
to follow is a way to hold up all of them. What counts is processor time of the thread that works on one row, which
stands still while the host has no core for it. The libraries' own units leave out what costs most: llguidance takes
300 ms for a mask of 10,000 items of an ambiguous grammar, and 1 ms for as many of others; xgrammar counts nothing.
"""

from __future__ import annotations

from collections.abc import Callable

FREE_SECONDS = 2e-4
FREE_SECONDS_PER_TOKEN = 4e-8
"""Of the vocabulary: 0.2 ms at 700 tokens, 1.5 at 32,000, 5 at 128,000. A token of a JSON schema takes a tenth of that;
where a library finds no short cut it looks at every token of the vocabulary, as near the `maxLength` of a string."""
BURST_SECONDS = 0.025
BURST_SECONDS_PER_TOKEN = 1e-6
"""Beyond what is free, for one output, and again for all of them together; the first masks of a schema need some."""
DEAR = 1 / 16
"""Of its burst: a row that has taken more than that is one to end when all together have none left."""
SHARED_RATE = 0.1
"""Of the time that passes: how fast the burst of all together comes back."""


def free_seconds(words: int) -> float:
    """Processor time that one output may take in each step, with masks of `words` words of 32 tokens."""
    return FREE_SECONDS + FREE_SECONDS_PER_TOKEN * 32 * words


def burst_seconds(words: int) -> float:
    """Processor time beyond what is free."""
    return BURST_SECONDS + BURST_SECONDS_PER_TOKEN * 32 * words


class RowBudget:
    """Of one output."""

    __slots__ = ("_burst", "_free", "is_heavy", "left")

    def __init__(self, words: int) -> None:
        self._free = free_seconds(words)
        self.left = self._burst = burst_seconds(words)
        """Seconds; below 0 the output has to end."""
        self.is_heavy = False
        """Whether its newest step took more than is free."""

    def spend(self, seconds: float) -> float:
        """Take the work of one step out; how much of it was not free."""
        self.left = min(self._burst, self.left + self._free - seconds)
        extra = max(0.0, seconds - self._free)
        self.is_heavy = extra > 0.0
        return extra

    @property
    def is_dear(self) -> bool:
        """Whether it has taken enough of its burst for that not to be a moment's trouble of the machine."""
        return self.left < self._burst * (1 - DEAR)


class SharedBudget:
    """Of all outputs of an engine: their work beyond what is free takes at most a share of the time that passes."""

    def __init__(self, words: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._at = clock()
        self.left = self._burst = burst_seconds(words)

    def refill(self) -> None:
        """Once a step."""
        now = self._clock()
        self.left = min(self._burst, self.left + SHARED_RATE * (now - self._at))
        self._at = now

    def spend(self, extra: float) -> None:
        """Take out what `RowBudget.spend` gave."""
        self.left -= extra
