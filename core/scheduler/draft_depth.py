"""Which drafts steps verify: the policy that the planner asks, once for each step.

A step that verifies drafts computes more tokens and takes longer; in return it may put out more. Two questions are
apart. Whether drafts pay at all, with all that they cost beside the model, is tried: steps with and without them take
turns, the better ones for longer (the goal of SmartSpec, Liu et al. 2024, and of SGLang's adaptive speculation). Which
of them pay follows from what the model takes: a draft must be right with more of a chance than the tokens that its time
would bring otherwise. How likely each is, the drafter knows.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Final, Protocol

import numpy as np

from core.batch.result import StepResult
from core.batch.spec_plan import NO_DRAFTS, Aim

MEMORY: Final = 1 / 32
"""Weight of the newest step in what is known of steps; older ones count less and less."""
CERTAIN: Final = 8
"""Steps of one kind whose median is taken, before newer ones are weighed in."""
OUTLIER: Final = 0.25
"""A step counts as shorter or longer than the usual one by this part at most: other processes take the cores at times,
and the loop thread the interpreter."""
MARGIN: Final = 0.98
"""Steps with drafts may bring so little of the tokens per second: those that find none look on, at a cost within this,
since what they would find cannot be seen without. A model whose steps take 25 ms looks all the time."""
HIGHEST: Final = 0.95
"""The most that a draft must be worth: where time is dearer, trying shows it."""
FIRST: Final = 16
"""Steps with drafts before it is known what they bring."""
TRIED: Final = 8
"""Steps in a row of the way that brought less, to see whether it still does."""
OFTEN: Final = 64
RARELY: Final = 256
"""Steps between two such tries, where both ways bring about the same, and where they do not."""
LOSS: Final = 0.01
"""The part of the time that tries of drafts may lose: where a try loses more, more steps come before the next one. A
draft head over a model whose steps take a millisecond takes several of them for each of its own."""
SELDOM: Final = 4096
"""Steps between two tries at most, however much one loses: what was given up may bring more by now."""
CLOSE: Final = 0.1
"""Up to this part more or less is about the same."""
GAIN: Final = 0.02
"""Tokens more that a row gets in a step with drafts, on average. What brings less is looked for where steps are LONG:
that two ways of a short step differ by a fiftieth is below what can be timed beside other work."""
LONG: Final = 0.01
"""Seconds of a step of which looking is a small part: it takes 0.05 to 0.2 ms on the host, on two cores."""
STALE: Final = 8
"""Tries of drafts without one to verify, after which it is forgotten what verifying takes. It may take less by now, and
steps that verify nothing do not show it."""


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


class Pace:
    """What steps of one kind bring on average, and usually take: the newest count most.

    The usual is a mean in which no step is far from the others (Huber 1964). A plain one of the few steps for which a
    way is tried would tell mostly which of them were interrupted.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.outputs = 0.0
        self.seconds = 0.0
        self._first: list[float] = []

    def add(self, outputs: int, seconds: float) -> None:
        """One step more."""
        self.steps += 1
        weight = max(MEMORY, 1 / self.steps)
        self.outputs += weight * (outputs - self.outputs)
        if self.steps <= CERTAIN:
            self._first.append(seconds)
            self.seconds = median(self._first)
        else:
            most = OUTLIER * self.seconds
            self.seconds += MEMORY * max(-most, min(most, seconds - self.seconds))


class Contest:
    """Whether drafts pay for some number of rows."""

    def __init__(self) -> None:
        self.plain = Pace()
        self.looking, self.verifying = Pace(), Pace()
        """Of steps with drafts: those that found none to verify, and the others."""
        self._share = 1.0
        """The part of these that had some to verify."""
        self._gain = 0.0
        """Tokens more than one that each row got in these."""
        self._unseen = 0
        """Tries of drafts since a step verified some."""
        self._lost = 0.0
        """Seconds beyond those in which steps without drafts would have brought the same, since the last try ended."""
        self._drafts, self._left, self._trying = True, FIRST, False

    def observe(self, result: StepResult) -> None:
        """One step more."""
        outputs, seconds, accepted = len(result.tokens), result.busy + result.idle, result.accepted
        if accepted is None:
            self.plain.add(outputs, seconds)
            return
        verified = np.count_nonzero(accepted.proposed) > 0
        steps = self.looking.steps + self.verifying.steps + 1
        weight = max(MEMORY, 1 / steps)
        self._share += weight * (verified - self._share)
        self._gain += weight * (outputs / len(result.rows) - 1 - self._gain)
        if verified:
            self._unseen = 0
        (self.verifying if verified else self.looking).add(outputs, seconds)
        if self.plain.steps:
            self._lost += seconds - outputs * self.plain.seconds / max(self.plain.outputs, 1e-9)

    @property
    def rate(self) -> float:
        """Tokens per second with drafts; 0 if there was no such step."""
        outputs = self._share * self.verifying.outputs + (1 - self._share) * self.looking.outputs
        seconds = self._share * self.verifying.seconds + (1 - self._share) * self.looking.seconds
        return outputs / max(seconds, 1e-9)

    def turn(self) -> bool:
        """Whether the next step looks for drafts."""
        if self._left == 0:
            self._trying = not self._trying
            if self._trying:
                self._drafts, self._left = not self._drafts, TRIED
                self._unseen += self._drafts
                if self._unseen >= STALE:
                    self.verifying, self._unseen = Pace(), 0
            else:
                # Steps in a row that lost since drafts had paid before are no try, and are not made up for.
                lost, self._lost = self._lost if self._drafts else 0.0, 0.0
                plain = self.plain.outputs / max(self.plain.seconds, 1e-9)
                ratio = self.rate / max(MARGIN * plain, 1e-9)
                self._drafts = ratio > 1 and (self._gain > GAIN or self.plain.seconds > LONG)
                self._left = OFTEN if abs(ratio - 1) < CLOSE else RARELY
                if not self._drafts:
                    afforded = lost / max(LOSS * self.plain.seconds, 1e-9)
                    self._left = int(max(self._left, min(SELDOM, afforded)))
        self._left -= 1
        return self._drafts

    def least(self, rows: int) -> float:
        """Tokens that `rows` rows would bring in the time that a step takes longer with drafts to verify."""
        if min(self.plain.steps, self.verifying.steps) < CERTAIN:
            return 0.0
        return rows * max(0.0, self.verifying.seconds / max(self.plain.seconds, 1e-9) - 1)


class AdaptiveDepth:
    """Up to `most` drafts for a row, where and as far as they pay."""

    def __init__(self, most: int, times: StepTimes) -> None:
        self._most = most
        self._times = times
        self._contests: dict[int, Contest] = {}
        """By the number of binary digits of the number of rows."""
        self._known: dict[int, tuple[float, float]] = {}

    def aim(self, rows: int) -> Aim:
        """See `Depth`."""
        rows = max(1, rows)
        contest = self._contest(rows)
        if not contest.turn():
            return NO_DRAFTS
        alone, with_all = self._taken(rows)
        rate = contest.rate or rows / max(alone, 1e-9)
        worth = min(HIGHEST, rate * (with_all - alone) / (rows * self._most))
        return Aim(self._most, worth, contest.least(rows))

    def observe(self, result: StepResult) -> None:
        """See `Depth`."""
        rows = len(result.rows)
        if rows == 0 or result.has_prompts:
            return
        self._contest(rows).observe(result)

    def _taken(self, rows: int) -> tuple[float, float]:
        """Seconds of a step without drafts, and of one with all of them."""
        if (found := self._known.get(rows)) is None:
            found = self._known[rows] = self._times.of(rows), self._times.of(rows * (1 + self._most))
        return found

    def _contest(self, rows: int) -> Contest:
        digits = rows.bit_length()
        if digits not in self._contests:
            self._contests[digits] = Contest()
        return self._contests[digits]
