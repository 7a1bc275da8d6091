"""How often drafts are right that their drafter gave so much of a chance: what it says of itself, corrected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

BUCKETS: Final = 8
"""Parts of 0 to 1 that are told apart."""
MEMORY: Final = 1 / 128
"""Weight of the newest draft in what is known; older ones count less and less."""
BELIEVED: Final = 8
"""As how many drafts that were seen the drafter's own word counts."""


class Calibration:
    """By the drafter's own probability of a draft, the part of such drafts that was right. Of several kinds."""

    def __init__(self, kinds: int) -> None:
        self._right = [[(bucket + 0.5) / BUCKETS for bucket in range(BUCKETS)] for _ in range(kinds)]
        self._seen = [[BELIEVED] * BUCKETS for _ in range(kinds)]

    def chance(self, kind: int, probability: float) -> float:
        """Of a draft of this `probability`, 0 to 1, to be right, given that those before it are."""
        return self._right[kind][_bucket(probability)]

    def judge(self, kind: int, probabilities: Sequence[float], guess: Sequence[int], came: Sequence[int]) -> None:
        """Of `guess`, with these `probabilities`, these tokens came. Says nothing of what is behind the first wrong."""
        right, seen = self._right[kind], self._seen[kind]
        for probability, guessed, token in zip(probabilities, guess, came):
            bucket = _bucket(probability)
            seen[bucket] += 1
            right[bucket] += max(MEMORY, 1 / seen[bucket]) * ((guessed == token) - right[bucket])
            if guessed != token:
                return


def _bucket(probability: float) -> int:
    # A row that is not finite has no probability, and its draft is as unlikely as any.
    return min(BUCKETS - 1, int(probability * BUCKETS)) if probability > 0 else 0
