"""How many drafts steps verify: the policy that the planner asks, once for each step.

A step that verifies K drafts of each of B rows computes more tokens than B and takes longer; in return it may put out
more than B. Both are known from what came before: how many drafts there were at each place, how many of them were
right, and what steps of so many tokens take. The number is the one with the most tokens per second (the goal of
SmartSpec, Liu et al. 2024, and of SGLang's adaptive speculation).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from core.batch.result import Accepted

MEMORY: Final = 1 / 32
"""Weight of one row's newest step in what is known of drafts; older steps count less and less."""
HOPE: Final = 0.8
"""The part of drafts that is taken for right at each place before any was tried."""
HOPED: Final = 8
"""As how many steps of a row that counts."""
GAIN: Final = 1.05
"""A change of the number must promise so many times the tokens per second."""
PROBE_EVERY: Final = 64
"""Steps between two probes, in which all that is allowed is tried: else what was given up once never came back."""
DECIDE_EVERY: Final = 4
"""Steps between two comparisons of the numbers."""
PROBE_STEPS: Final = 4
"""Steps of a probe. Drafts are verified one step after they were proposed, and known one or two later."""


class Depth(Protocol):
    """Loop thread only."""

    def drafts(self, rows: int) -> int:
        """The most drafts for each of `rows` rows: to propose behind the next step, and to verify in the one after."""
        ...

    def observe(self, accepted: Accepted, seconds: float) -> None:
        """What became of drafts in a step without prompts, which took `seconds` from the end of the step before."""
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


class AdaptiveDepth:
    """From 0 to `most`, whatever promises the most tokens per second for the rows at hand."""

    def __init__(self, most: int, times: StepTimes) -> None:
        self._most = most
        self._times = times
        self._tried: npt.NDArray[np.float64] = np.ones(most)
        """By place: of rows that could try a draft there, the part that had one. Hopeful at first, as `_right`."""
        self._right: npt.NDArray[np.float64] = np.power(HOPE, np.arange(1, most + 1), dtype=np.float64)
        """By place: of the same rows, the part whose draft there, and all before it, was right."""
        self._seen = np.full(most, HOPED)
        """By place: rows that could try a draft there so far."""
        self._beside = 0.0
        """Seconds of a step beside the model: sampling, drafting, and what keeps the device waiting."""
        self._current = most
        self._steps = 0

    def drafts(self, rows: int) -> int:
        """See `Depth`."""
        self._steps += 1
        if self._steps % PROBE_EVERY < PROBE_STEPS:
            return self._most
        if self._steps % DECIDE_EVERY:
            return self._current
        rates = self._rates(max(1, rows))
        best = int(rates.argmax())
        if rates[best] > GAIN * rates[self._current]:
            self._current = best
        return self._current

    def observe(self, accepted: Accepted, seconds: float) -> None:
        """See `Depth`."""
        places = np.arange(1, self._most + 1)
        could = accepted.planned[:, None] > places
        rows = could.sum(axis=0)
        self._seen += rows
        # A plain mean at first, so that the hope does not outlast what is known.
        weights = np.maximum(1 - (1 - MEMORY) ** rows, rows / self._seen)
        tried, right = accepted.proposed[:, None] >= places, accepted.counts[:, None] > places
        for kept, now in ((self._tried, tried), (self._right, right)):
            part = (now & could).sum(axis=0) / np.maximum(rows, 1)
            kept += weights * (part - kept)
        model = self._times.of(len(accepted.counts) + int(accepted.proposed.sum()))
        # At least a part of the model's time stays: it may have become faster since it was timed.
        self._beside += MEMORY * (max(seconds - model, -0.7 * model) - self._beside)

    def _rates(self, rows: int) -> npt.NDArray[np.float64]:
        """float64[most + 1]: tokens per second with each number of drafts."""
        outputs = rows * np.concatenate([[1.0], 1 + np.cumsum(self._right)])
        tokens = rows * np.concatenate([[1.0], 1 + np.cumsum(self._tried)])
        seconds = np.array([self._times.of(each) for each in tokens.tolist()]) + self._beside
        return outputs / np.maximum(seconds, 1e-9)
