"""What one step hands to the output processor: new tokens, and requests that ended."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from core.batch.result import LogprobResult
from core.errors import SlipstreamError
from core.types.arrays import Bools, Ints
from core.types.io import FinishReason
from core.types.request import Req


@dataclass(frozen=True, slots=True)
class Ending:
    """How one request ends: with a reason, or with the error that its stream ends with. Exactly one of them is set.

    As a command to `Intake` it ends `req`, in whatever state that is; a request that ended meanwhile is left alone.
    `condemned` then means that another output of the same prompt was condemned: if `req` has had no logits of its own,
    what it computed leaves the prefix cache too.

    As an output of a step it is the terminal of `req`. `condemned` then means that the numbers of `req` were wrong, so
    that other outputs of the same prompt are not trusted before they have had logits.
    """

    req: Req
    reason: FinishReason | None = None
    matched_stop: str | int | None = None
    """The stop string or stop token id that ended it, if one did."""
    error: SlipstreamError | None = None
    condemned: bool = False


@dataclass(frozen=True, slots=True)
class StepTokens:
    """New tokens of one step: `tokens[i]` is output number `positions[i]` (from 0) of `reqs[i]`.

    A request whose drafts were right has several, one behind the other.

    `logprob_rows[i]` is the place of that token in `logprobs`, if the step computed any. `tokens` is a list because it
    is read for every request. `positions` and `logprob_rows`, int64[n], stay arrays because they are read for few, and
    making a Python integer costs as much as using it.
    """

    reqs: list[Req]
    tokens: list[int]
    positions: Ints
    logprobs: LogprobResult | None = None
    logprob_rows: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    drafts: Bools | None = None
    """bool[n]: which tokens were drafts; None where none was. Read for few, as `positions` are."""
    of_prompts: bool = False
    """These are no new tokens but those of prompts, whose log probabilities are told; `positions` are below 0."""


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """Apply `tokens` first, then `ended`: an ended request has all its tokens in `tokens` or in earlier steps.

    `begun`: requests whose first new token the device computes now. One that came back from the queue is named again.
    """

    tokens: tuple[StepTokens, ...]
    ended: tuple[Ending, ...]
    begun: tuple[Req, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.tokens or self.ended or self.begun)
