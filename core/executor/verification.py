"""The interface between a step and a way to verify drafts. Which way, is chosen where the engine is built.

The CPU's is `speculator`: it reads the relay in place, and computes no place more than there are drafts. An
accelerator's is `grid_speculator`: nothing on the forward thread waits for a value of the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from core.batch.forward_batch import ForwardBatch
from core.batch.hidden import HiddenRequest
from core.batch.result import Published
from core.batch.sampling_batch import SamplingBatch
from core.batch.schedule_batch import ScheduleBatch
from core.device.event import Event
from core.device.staging import Staging
from core.relay.resolve import DecodeRows, ResolvedInputs
from core.sampling.sampler import SampleOutput
from core.speculation.grid import spread_over
from core.speculation.guesses import Guesses, columns
from core.speculation.verification import Outcome, Tried
from core.types.arrays import Ints


@dataclass(frozen=True, slots=True)
class Attempt:
    """What a step tries for n decode rows, as far as the host knows: inputs of a grid, which travel with the step."""

    width: int
    """Places of each row: one more than the most drafts."""
    room: Ints
    """int64[n]: the most drafts that each row may try."""
    limits: Ints
    """int64[n]: the most tokens that each row may ever have in the pools."""
    guesses: Guesses
    known: Ints
    """int64[n]: tokens of each text that the host knew when it guessed."""
    arrays: tuple[Ints, ...] = field(init=False)
    """All of it, flat."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "arrays", (self.room, self.limits, *columns(self.guesses, self.known)))

    def padded(self, size: int) -> list[Ints]:
        """`arrays`, each filled up with zeros to `size` rows."""
        pad = size - len(self.room)
        length = self.guesses.ids.shape[1]
        wide = (1, 1, length, 1, 1)
        return [np.concatenate([a, np.zeros(pad * each, np.int64)]) for a, each in zip(self.arrays, wide, strict=True)]

    def spread(self, sampling: SamplingBatch) -> SamplingBatch:
        """The options of all places of the grid, given those of the rows."""
        return spread_over(sampling, self.width)


class Verification(Protocol):
    """Forward thread only."""

    @property
    def needs_hidden(self) -> HiddenRequest:
        """Which hidden states the model must give in every step."""
        ...

    def rehearse(self, forward: ForwardBatch) -> None:
        """Before any step: have what drafts launch its kernels, on the padding that the model has run over."""
        ...

    def begin(self, batch: ScheduleBatch) -> Attempt | None:
        """First thing in a step: tell the drafter of new owners. Returns what the step tries if it is to be a grid."""
        ...

    def trial(self, batch: ScheduleBatch, decode: DecodeRows, inputs: ResolvedInputs, staging: Staging) -> Tried | None:
        """What `batch`, which begun last, computes of its decode rows, which have these inputs; None without drafts.

        `staging`: may have the attempt's arrays on the device already.
        """
        ...

    def forward_batch(self, batch: ScheduleBatch, decode: DecodeRows, trial: Tried) -> ForwardBatch:
        """What the model runs over for `trial`, which `trial` has returned."""
        ...

    def host_lens(self, batch: ScheduleBatch, inputs: ResolvedInputs) -> tuple[Ints, Ints]:
        """(`prefix_lens_host`, `extend_lens_host`) of a step with decode rows that tries no drafts."""
        ...

    def tell(self, batch: ScheduleBatch, outcome: Outcome | None, told: Callable[[Published], None]) -> None:
        """Behind the publish event: tell the lengths of a step that may verify drafts, if they are known already."""
        ...

    def drafts_behind(self, batch: ScheduleBatch) -> bool:
        """Whether `drafted` takes time on the forward stream."""
        ...

    def drafted(
        self,
        batch: ScheduleBatch,
        forward: ForwardBatch | None,
        lens: torch.Tensor,
        tokens: torch.Tensor,
        outcome: Outcome | None,
    ) -> dict[str, torch.Tensor]:
        """Columns of the relay for the S rows that sampled; none where no drafts are left and none are new.

        `forward`: what the model ran over; None for a replay. `lens`, int64[S]: tokens of each in the pools. `tokens`:
        all that were sampled, one for each row or, with an outcome, for each place.
        """
        ...

    def on_their_way(self, batch: ScheduleBatch, host: SampleOutput, copy_done: Event, outcome: Outcome | None) -> None:
        """Last thing in a step: its tokens are on their way to `host`, readable once `copy_done` has fired."""
        ...
