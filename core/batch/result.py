"""What comes back from one step."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from core.batch.scoring_batch import ScoringBatch
from core.types.arrays import Bools, Ints


@dataclass(frozen=True, slots=True)
class LogprobResult:
    """Log probabilities of S sampled tokens on the host: `values` [S], natural logarithms.

    `top_ids` and `top_values` are [S, K], where K is the most alternatives that any row wants. `chosen`, [S, C], are
    those of the ids that rows name; C is the most that any row names.
    """

    values: npt.NDArray[np.float32]
    top_ids: Ints
    top_values: npt.NDArray[np.float32]
    chosen: npt.NDArray[np.float32] | None = None

    def of(self, which: Bools) -> LogprobResult:
        """Those at the places, bool[S], that are set."""
        chosen = None if self.chosen is None else self.chosen[which]
        return LogprobResult(self.values[which], self.top_ids[which], self.top_values[which], chosen)


@dataclass(frozen=True, slots=True)
class ScoredPrompts:
    """The log probabilities of the P tokens of a `ScoringBatch`, on the host."""

    batch: ScoringBatch
    found: LogprobResult


@dataclass(frozen=True, slots=True)
class VectorResult:
    """Embeddings float32[E, H] on the host, and the owners (rows, generations), int64[E] each, that they belong to."""

    rows: Ints
    generations: Ints
    values: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Exhausted:
    """Owners (row, generation), int64[n] each, for which there was too little memory; their tokens mean nothing."""

    rows: Ints
    generations: Ints

    def __len__(self) -> int:
        return len(self.rows)

    def beside(self, others: Exhausted) -> Exhausted:
        """The owners of both, these first."""
        if not len(others):
            return self
        rows, generations = (self.rows, others.rows), (self.generations, others.generations)
        return Exhausted(np.concatenate(rows), np.concatenate(generations))


@dataclass(frozen=True, slots=True)
class Accepted:
    """How far each of S rows came in a step that could verify drafts; int64[S] each, on the host."""

    counts: Ints
    """Tokens of each row: the drafts that were right, and one more. 1 for a row without drafts."""
    proposed: Ints
    """Drafts that were verified."""
    planned: Ints
    """The most tokens that the plan allowed for."""

    def of(self, places: Ints) -> Accepted:
        """Those of the rows at `places`, int64[n] of S."""
        return Accepted(self.counts[places], self.proposed[places], self.planned[places])


@dataclass(frozen=True, slots=True)
class Published:
    """How far a step that could verify drafts has brought its S rows; known on the host before its tokens are.

    int64[S] each.
    """

    step_id: int
    rows: Ints
    generations: Ints
    counts: Ints
    """Tokens of each row: the drafts that were right, and one more."""
    planned: Ints
    """The most tokens that the plan allowed for."""


NO_ROWS = Exhausted(np.empty(0, np.int64), np.empty(0, np.int64))


class StepOutOfMemory(Exception):
    """A step had too little memory for work that cannot be split; says how much was missing, and what the step was."""


class StepBroken(Exception):
    """A step was ended by a BaseException that is no Exception: a native panic (pyo3), SystemExit, a cancellation.

    Raised on the event loop instead of it, with it as the cause: the loop would take a SystemExit for an order to stop,
    and a CancelledError for the end of the scheduler's task.
    """


@dataclass(frozen=True, slots=True)
class StepResult:
    """Sampled tokens of step `step_id` on the host, with the owner (row, generation) that each of S rows is for.

    `tokens`, int64[A], and what `logprobs` says of them, go row after row: `accepted.counts[i]` of row i, or one each.

    `non_finite[i]`: some logits of `rows[i]` hold NaN or +inf; its tokens mean nothing. `assert_counts`: cumulative
    device counters in the order of `DEVICE_CHECKS`, empty when asserts are off. `error`: the step failed as a whole and
    no array is valid. `busy`: device seconds of this step. `idle`: device seconds between the end of the step before
    and the start of this one.
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
    """Vectors of the embeddings that end with this step."""
    grammar_status: npt.NDArray[np.int8] | None = None
    """int8[S] of GrammarStatus; None if no row of the step is constrained."""
    exhausted: Exhausted = NO_ROWS
    was_split: bool = False
    """Whether rows were sampled a few at a time, for lack of memory."""
    violated: npt.NDArray[np.bool_] | None = None
    """bool[S]: the row's input violated a device check, so its tokens mean nothing; None where no row's did."""
    accepted: Accepted | None = None
    """None where each row has one token, as planned."""
    drafting: float = 0.0
    """Seconds of `busy` in which drafts for later steps were made."""
    has_prompts: bool = False
    """Whether the step computed prompts."""
    scored: ScoredPrompts | None = None
    """Log probabilities of prompt tokens, if some are told."""

    @classmethod
    def failed(cls, step_id: int, error: BaseException) -> StepResult:
        """The result of a step that raised `error`, wrapped in `StepBroken` if it is no Exception."""
        if not isinstance(error, Exception):
            cause, error = error, StepBroken(f"the step was ended by {type(error).__name__}: {error}")
            error.__cause__ = cause
        none = np.empty(0, np.int64)
        return cls(step_id, none, none, none, np.empty(0, np.bool_), error=error)
