"""A tenant's tokens per minute: charged before a request runs, and corrected by what it used."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

MINUTE = 60.0


class TokenBudget:
    """Fills by `per_minute` tokens a minute, up to one minute's worth. Event-loop thread only.

    A request that may need more than one minute's worth is charged exactly that, so it is admitted when the budget is
    full. Tokens that a request uses beyond its charge are owed: the level can fall below zero, and then nothing is
    admitted until it has filled again.
    """

    def __init__(self, per_minute: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._level, self._clock = per_minute, per_minute, clock
        self._at = clock()

    @property
    def full(self) -> bool:
        """Whether forgetting the budget would change nothing."""
        self._fill()
        return self._level >= self._limit

    def resize(self, per_minute: float) -> None:
        """Apply another limit from now on. Used tokens stay used."""
        self._fill()
        self._level += per_minute - self._limit
        self._limit = per_minute

    def take(self, tokens: int) -> int:
        """Charge a request that may need `tokens`. Returns the tokens charged; 0 if the budget has too few."""
        self._fill()
        charge = min(tokens, math.floor(self._limit))
        if charge > self._level:
            return 0
        self._level -= charge
        return charge

    def wait(self, tokens: int) -> float:
        """Seconds until `take(tokens)` can succeed, if nothing else is taken or given back meanwhile."""
        self._fill()
        lacking = min(tokens, math.floor(self._limit)) - self._level
        return max(0.0, lacking) * MINUTE / self._limit

    def give(self, tokens: int) -> None:
        """Give back `tokens` that were charged and not used; if negative, take tokens used and not charged."""
        self._level += tokens
        self._fill()

    def _fill(self) -> None:
        now = self._clock()
        self._level = min(self._limit, self._level + (now - self._at) * self._limit / MINUTE)
        self._at = now
