"""Which drafts steps verify: the policy that the planner asks, once for each step.

A step that verifies drafts computes more tokens and takes longer; in return it may put out more. Two questions are
apart. Whether drafts pay at all, with all that they cost beside the model, is tried: steps with and without them take
turns, the better ones for longer (the goal of SmartSpec, Liu et al. 2024, and of SGLang's adaptive speculation). Which
of them pay follows from what the model takes: a draft must be right with more of a chance than the tokens that its time
would bring otherwise. How likely each is, the drafter knows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from core.batch.result import StepResult
from core.batch.spec_plan import NO_DRAFTS, Aim

MEMORY: Final = 1 / 32
"""Weight of the newest step in what is known of steps; older ones count less and less."""
OUTLIER: Final = 4.0
"""A step counts as so many times the usual one at most: the process may have been stopped meanwhile."""
MARGIN: Final = 1.02
"""Drafts must bring so many times the tokens per second: without them there is less to do."""
HIGHEST: Final = 0.95
"""The most that a draft must be worth: where time is dearer, trying shows it."""
FIRST: Final = 16
"""Steps with drafts before it is known what they bring."""
TRIED: Final = 8
"""Steps in a row of the way that brought less, to see whether it still does."""
OFTEN: Final = 64
RARELY: Final = 256
"""Steps between two such tries, where both ways bring about the same, and where they do not."""
CLOSE: Final = 0.1
"""Up to this part more or less is about the same."""


class Depth(Protocol):
    """Loop thread only."""

    def aim(self, rows: int) -> Aim:
        """Which drafts to propose behind the next step, and to verify in the one after, for `rows` rows."""
        ...

    def observe(self, result: StepResult) -> None:
        """Take note of how long a step took, and what it brought."""
        ...


@dataclass(frozen=True, slots=True)
class StepTimes:
    """What the model takes for a step of so many tokens: `seconds[i]` for `tokens[i]`, both rising."""

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]

    def of(self, tokens: float) -> float:
        """Seconds of a step of `tokens`, between and beyond those that were timed as along a line."""
        last = len(self.tokens) - 1
        if tokens >= self.tokens[last] and last:
            slope = (self.seconds[last] - self.seconds[0]) / (self.tokens[last] - self.tokens[0])
            return self.seconds[last] + slope * (tokens - self.tokens[last])
        return float(np.interp(tokens, self.tokens, self.seconds))


@dataclass(slots=True)
class Pace:
    """What steps of one kind bring, and take: means in which the newest count most."""

    steps: int = 0
    outputs: float = 0.0
    seconds: float = 0.0

    def add(self, outputs: int, seconds: float) -> None:
        """One step more."""
        if self.steps >= TRIED:
            seconds = min(seconds, OUTLIER * self.seconds)
        self.steps += 1
        weight = max(MEMORY, 1 / self.steps)
        self.outputs += weight * (outputs - self.outputs)
        self.seconds += weight * (seconds - self.seconds)

    @property
    def rate(self) -> float:
        """Tokens per second; 0 if there was no step."""
        return self.outputs / max(self.seconds, 1e-9)


class Contest:
    """Whether drafts pay for some number of rows."""

    def __init__(self) -> None:
        self.plain, self.drafting = Pace(), Pace()
        self._drafts, self._left, self._trying = True, FIRST, False

    def turn(self) -> bool:
        """Whether the next step looks for drafts."""
        if self._left == 0:
            self._trying = not self._trying
            if self._trying:
                self._drafts, self._left = not self._drafts, TRIED
            else:
                ratio = self.drafting.rate / max(MARGIN * self.plain.rate, 1e-9)
                self._drafts, self._left = ratio > 1, OFTEN if abs(ratio - 1) < CLOSE else RARELY
        self._left -= 1
        return self._drafts


class AdaptiveDepth:
    """Up to `most` drafts for a row, where and as far as they pay."""

    def __init__(self, most: int, times: StepTimes) -> None:
        self._most = most
        self._times = times
        self._contests: dict[int, Contest] = {}
        """By the number of binary digits of the number of rows."""

    def aim(self, rows: int) -> Aim:
        """See `Depth`."""
        rows = max(1, rows)
        contest = self._contest(rows)
        if not contest.turn():
            return NO_DRAFTS
        alone, with_all = self._times.of(rows), self._times.of(rows * (1 + self._most))
        rate = contest.drafting.rate or rows / max(alone, 1e-9)
        return Aim(self._most, min(HIGHEST, rate * (with_all - alone) / (rows * self._most)))

    def observe(self, result: StepResult) -> None:
        """See `Depth`."""
        rows = len(result.rows)
        if rows == 0 or result.has_prompts:
            return
        contest = self._contest(rows)
        pace = contest.plain if result.accepted is None else contest.drafting
        pace.add(len(result.tokens), result.busy + result.idle)

    def _contest(self, rows: int) -> Contest:
        digits = rows.bit_length()
        if digits not in self._contests:
            self._contests[digits] = Contest()
        return self._contests[digits]
