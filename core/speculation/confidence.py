"""How likely drafts are to be right, by what they were found by, from how often such drafts were."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

MEMORY: Final = 1 / 64
"""Weight of the newest guess in what is known; older ones count less and less."""
HOPE: Final = 0.8
"""The chance that stands before any guess was judged."""
HOPED: Final = 4
"""As how many guesses that counts."""


class Prospect(NamedTuple):
    """What is expected of the first tokens of a guess."""

    number: int
    """How many of its tokens are worth their place."""
    right: float
    """How many of these are right, on average."""


class Confidence:
    """Of guesses of several kinds, at tokens one after the other. A guess is judged by what came, verified or not."""

    def __init__(self, kinds: int, most: int) -> None:
        """`most`: tokens of the longest guess."""
        self._right = [[HOPE] * most for _ in range(kinds)]
        """By kind and place: of guesses that were right up to there, the part that was right there too."""
        self._seen = [[HOPED] * most for _ in range(kinds)]

    def judge(self, kind: int, guess: Sequence[int], came: Sequence[int]) -> None:
        """Of `guess` these tokens came. Says nothing of places behind them, nor behind the first that was wrong."""
        right, seen = self._right[kind], self._seen[kind]
        for place, (guessed, token) in enumerate(zip(guess, came)):
            seen[place] += 1
            right[place] += max(MEMORY, 1 / seen[place]) * ((guessed == token) - right[place])
            if guessed != token:
                return

    def prospect(self, kind: int, length: int, worth: float) -> Prospect:
        """Of a guess of `length` tokens, those that have a chance of at least `worth`."""
        chance, right = 1.0, 0.0
        for place, alone in enumerate(self._right[kind][:length]):
            chance *= alone
            if chance < worth:
                return Prospect(place, right)
            right += chance
        return Prospect(length, right)
