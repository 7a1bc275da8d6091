"""What one step hands to the output processor: new tokens, and requests that ended."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from core.batch.result import LogprobResult
from core.errors import SlipstreamError
from core.types.arrays import Ints
from core.types.io import FinishReason
from core.types.request import Req


@dataclass(frozen=True, slots=True)
class Ending:
    """How one request ends: a reason, or the error its stream ends with. Exactly one of the two is set.

    On its way in, through the intake, it ends `req` now, wherever it is; a request that ended meanwhile is left alone.
    `condemned`: another output of the same prompt was; without logits of its own, what this one computed goes as well.

    On its way out it is the terminal of `req`. `condemned`: its numbers were wrong, and outputs of the same prompt are
    not to be trusted before they have logits.
    """

    req: Req
    reason: FinishReason | None = None
    matched_stop: str | int | None = None
    error: SlipstreamError | None = None
    condemned: bool = False


@dataclass(frozen=True, slots=True)
class StepTokens:
    """New tokens of one step, one per request: `tokens[i]` is output number `positions[i]` of `reqs[i]`.

    `logprob_rows[i]` is the place of that token in `logprobs`, when the step computed any. What every reader walks
    through is a list; what few look into stays an array, because an integer of Python's own costs as much as its use.
    """

    reqs: list[Req]
    tokens: list[int]
    positions: Ints
    logprobs: LogprobResult | None = None
    logprob_rows: Ints = field(default_factory=lambda: np.empty(0, np.int64))


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """Tokens first, terminals after: an ended request has all its tokens in `tokens` or in earlier steps."""

    tokens: tuple[StepTokens, ...]
    ended: tuple[Ending, ...]

    def __bool__(self) -> bool:
        return bool(self.tokens or self.ended)
