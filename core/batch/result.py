"""What comes back from one step."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from core.types.arrays import Ints


@dataclass(frozen=True, slots=True)
class LogprobResult:
    """Host log probabilities of the S sampled tokens; `top_ids` and `top_values` are [S, K], K the most asked for."""

    values: npt.NDArray[np.float32]
    top_ids: Ints
    top_values: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class VectorResult:
    """float32[E, H] on the host, with the identities they are for."""

    rows: Ints
    generations: Ints
    values: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Exhausted:
    """Owners (row, generation) that memory did not suffice for, int64[n] each; their tokens mean nothing."""

    rows: Ints
    generations: Ints

    def __len__(self) -> int:
        return len(self.rows)

    def beside(self, others: Exhausted) -> Exhausted:
        """These and `others`."""
        if not len(others):
            return self
        rows, generations = (self.rows, others.rows), (self.generations, others.generations)
        return Exhausted(np.concatenate(rows), np.concatenate(generations))


NO_ROWS = Exhausted(np.empty(0, np.int64), np.empty(0, np.int64))


class StepOutOfMemory(Exception):
    """A step had no memory where it cannot be run again; says how much was missing, and what the step was."""


class StepBroken(Exception):
    """A step was ended by something that is no Exception: a panic of native code (pyo3), SystemExit, a cancellation.

    Raised on the event loop in its place, as the cause, because the loop would take a SystemExit for an order to stop
    and a CancelledError for the end of the scheduler's task.
    """


@dataclass(frozen=True, slots=True)
class StepResult:
    """Sampled tokens of step `step_id` on the host, with the identity (row, generation) each is for.

    `non_finite[i]`: the logits of that row held NaN or +inf, and `tokens[i]` means nothing. `assert_counts` is the
    cumulative device counter array in the order of `DEVICE_CHECKS`, empty when asserts are off. `error` means the step
    failed as a whole and no array is valid. `busy` and `idle` are device seconds: of this step, and between the end of
    the step before it and its start.
    """

    step_id: int
    rows: Ints
    generations: Ints
    tokens: Ints
    non_finite: npt.NDArray[np.bool_]
    logprobs: LogprobResult | None = None
    assert_counts: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    busy: float = 0.0
    idle: float = 0.0
    error: Exception | None = None
    vectors: VectorResult | None = None
    """Of the embeddings that end with this step."""
    grammar_status: npt.NDArray[np.int8] | None = None
    """int8[S] of GrammarStatus; None if no row of the step is constrained."""
    exhausted: Exhausted = NO_ROWS
    was_split: bool = False
    """Rows were sampled a few at a time, for want of memory."""
    violated: npt.NDArray[np.bool_] | None = None
    """bool[S]: the row's input violated a device check, so that `tokens[i]` means nothing; None where no row's did."""

    @classmethod
    def failed(cls, step_id: int, error: BaseException) -> StepResult:
        """The result of a step that raised; what is no Exception comes wrapped in `StepBroken`."""
        if not isinstance(error, Exception):
            cause, error = error, StepBroken(f"the step was ended by {type(error).__name__}: {error}")
            error.__cause__ = cause
        none = np.empty(0, np.int64)
        return cls(step_id, none, none, none, np.empty(0, np.bool_), error=error)
