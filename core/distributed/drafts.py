"""Drafts of engines of several ranks: rank 0 makes them and judges them, and the others compute what it tries.

What a step tries goes to the other ranks when rank 0 knows it: a ragged trial as a whole; of a grid what the host
guessed, of which each rank's device finds out the rest by itself. Sampled tokens are those of rank 0 on every rank, so
each of them judges alike, and knows by itself how far each row came.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch

from core.batch.forward_batch import ForwardBatch
from core.batch.hidden import NO_HIDDEN
from core.batch.result import Published
from core.batch.schedule_batch import ScheduleBatch
from core.device.event import Event
from core.device.staging import Staging
from core.distributed.wire import decode, encode
from core.distributed.world import World
from core.executor.device_state import DeviceState
from core.executor.grid_speculator import GridSpeculator
from core.executor.speculator import Speculator, host_lens, ragged_batch
from core.executor.verification import Attempt
from core.relay.resolve import DecodeRows, ResolvedInputs
from core.sampling.sampler import SampleOutput
from core.speculation.drafter import Drafter, Ran
from core.speculation.guesses import Guesser, Guesses
from core.speculation.trial import Trial
from core.speculation.verification import Judgement, Outcome, Tried
from core.types.arrays import Ints


@dataclass(frozen=True)
class ToldTrial(Trial):
    """A trial of rank 0, which tells the others at how many places tokens may count: it has the constraints."""

    world: World

    def judge(self, sampled: torch.Tensor, most: Ints | None, staging: Staging) -> Judgement:
        """See `Tried`."""
        self.world.send(encode(most))
        return super().judge(sampled, most, staging)


@dataclass(frozen=True)
class HeardTrial(Trial):
    """A trial that rank 0 told of."""

    world: World

    def judge(self, sampled: torch.Tensor, most: Ints | None, staging: Staging) -> Judgement:
        """See `Tried`: by what rank 0 says, since nothing is sampled here."""
        return super().judge(sampled, _heard(self.world), staging)


class LeadingSpeculator(Speculator):
    """A `Speculator` that tells every trial."""

    def __init__(self, world: World, drafter: Drafter, state: DeviceState) -> None:
        super().__init__(drafter, state)
        self._world = world

    def trial(self, batch: ScheduleBatch, decode: DecodeRows, inputs: ResolvedInputs, staging: Staging) -> Trial | None:
        """See `Verification`."""
        found = super().trial(batch, decode, inputs, staging)
        if not batch.verifies:
            return None
        parts = None if found is None else {each.name: getattr(found, each.name) for each in fields(Trial)}
        self._world.send(encode(parts))
        return None if parts is None else ToldTrial(**parts, world=self._world)


class FollowingSpeculator:
    """The `Verification` of a rank that hears of trials."""

    needs_hidden = NO_HIDDEN

    def __init__(self, world: World, state: DeviceState) -> None:
        self._world = world
        self._state = state

    def rehearse(self, forward: ForwardBatch) -> None:
        """See `Verification`: nothing is drafted here."""

    def begin(self, batch: ScheduleBatch) -> None:
        """See `Verification`: no step is a grid."""

    def trial(self, batch: ScheduleBatch, decode: DecodeRows, inputs: ResolvedInputs, staging: Staging) -> Trial | None:
        """See `Verification`."""
        parts = _heard(self._world) if batch.verifies else None
        return None if parts is None else HeardTrial(**parts, world=self._world)

    def forward_batch(self, batch: ScheduleBatch, decode: DecodeRows, trial: Tried) -> ForwardBatch:
        """See `Verification`."""
        assert isinstance(trial, Trial), "it came from here"
        return ragged_batch(self._state, batch, decode, trial, NO_HIDDEN)

    def host_lens(self, batch: ScheduleBatch, inputs: ResolvedInputs) -> tuple[Ints, Ints]:
        """See `Verification`."""
        return host_lens(batch, inputs)

    def tell(self, batch: ScheduleBatch, outcome: Outcome | None, told: Callable[[Published], None]) -> None:
        """See `Verification`: nothing is planned here."""

    def drafts_behind(self, batch: ScheduleBatch) -> bool:
        """See `Verification`."""
        return False

    def drafted(
        self,
        batch: ScheduleBatch,
        forward: ForwardBatch | None,
        lens: torch.Tensor,
        tokens: torch.Tensor,
        outcome: Outcome | None,
    ) -> dict[str, torch.Tensor]:
        """See `Verification`."""
        return {}

    def on_their_way(self, batch: ScheduleBatch, host: SampleOutput, copy_done: Event, outcome: Outcome | None) -> None:
        """See `Verification`."""


class LeadingGrid(GridSpeculator):
    """A `GridSpeculator` that tells every attempt."""

    def __init__(self, world: World, guesser: Guesser, state: DeviceState, most: int) -> None:
        super().__init__(guesser, state, most)
        self._world = world

    def begin(self, batch: ScheduleBatch) -> Attempt | None:
        """See `Verification`."""
        attempt = super().begin(batch)
        if batch.verifies:
            self._world.send(encode(attempt))
        return attempt


class FollowingGrid(GridSpeculator):
    """A `GridSpeculator` that hears of attempts."""

    def __init__(self, world: World, state: DeviceState, most: int) -> None:
        super().__init__(_NoGuesser(), state, most)
        self._world = world

    def begin(self, batch: ScheduleBatch) -> Attempt | None:
        """See `Verification`."""
        self._attempt = _heard(self._world) if batch.verifies else None
        return self._attempt

    def on_their_way(self, batch: ScheduleBatch, host: SampleOutput, copy_done: Event, outcome: Outcome | None) -> None:
        """See `Verification`: what was sampled is heard of by rank 0."""


class _NoGuesser:
    """Stands where a `Guesser` would, and is asked for nothing."""

    def begin(self, batch: ScheduleBatch) -> None:
        raise AssertionError("rank 0 guesses")

    def hear(self, ran: Ran) -> None:
        raise AssertionError("rank 0 guesses")

    def guess(self, rows: Ints, most: int) -> Guesses:
        raise AssertionError("rank 0 guesses")


def _heard(world: World) -> Any:
    return decode(world.receive(), torch.Tensor.clone)
