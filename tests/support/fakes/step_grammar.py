"""A grammar without a library: each token allows a few next ones, worked out from it and from how many there were."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from core.types.grammar import Matcher, Words

WIDTH = 90
FEW = 5


def successors(taken: Sequence[int]) -> list[int]:
    """Tokens that may follow those `taken`, all below WIDTH."""
    last = taken[-1] if taken else 7
    return sorted({(31 * last + 17 * len(taken) + i * i) % WIDTH for i in range(FEW)})


def follows(tokens: Sequence[int]) -> bool:
    """Whether each token was allowed behind those before it."""
    return all(token in successors(tokens[:place]) for place, token in enumerate(tokens))


class StepMatcher:
    """See `Matcher`; keeps all it took."""

    def __init__(self) -> None:
        self.taken: list[int] = []
        self.failure: str | None = None
        self.is_terminated = False
        self.gave_up = False

    def fill(self, words: Words) -> bool:
        for token in successors(self.taken):
            words[token // 32] |= np.uint32(1 << (token % 32)).astype(np.int32)
        return True

    def accept(self, token: int) -> bool:
        if token not in successors(self.taken):
            self.failure = "not allowed"
            return False
        self.taken.append(token)
        return True

    def fork(self) -> Matcher:
        made = StepMatcher()
        made.taken, made.failure = [*self.taken], self.failure
        return made


class StepGrammar:
    """See `Grammar`."""

    field = "constraint.regex"
    words = 12

    def matcher(self) -> Matcher:
        return StepMatcher()

    def accept_all(self, matchers: Sequence[Matcher], tokens: Sequence[int]) -> Sequence[bool]:
        return [matcher.accept(token) for matcher, token in zip(matchers, tokens, strict=True)]

    def fill_all(self, matchers: Sequence[Matcher], words: Words) -> npt.NDArray[np.bool_]:
        return np.array([matcher.fill(words[i]) for i, matcher in enumerate(matchers)], np.bool_)
