"""What a step tries of its drafts, and what becomes of them: the two interfaces between a step and a way to verify.

There are two ways. On the CPU a trial is ragged, and known on the host (`trial`). On an accelerator it is a grid under
a mask, of which the host knows the width alone (`grid`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from core.batch.sampling_batch import SamplingBatch
from core.device.staging import Staging
from core.types.arrays import Bools, Ints


class KnownDrafts(Protocol):
    """T tokens of n rows, on the host."""

    @property
    def counts(self) -> Ints:
        """int64[n]: tokens of each row, its newest one and its drafts."""
        ...

    @property
    def starts(self) -> Ints:
        """int64[n]: the place, among T, of each row's newest token."""
        ...

    @property
    def ids(self) -> Ints:
        """int64[T]."""
        ...


class Tried(Protocol):
    """T places of n rows, row after row, at each of which a step samples a token."""

    @property
    def counts(self) -> Ints:
        """int64[n]: places of each row."""
        ...

    @property
    def row_of(self) -> Ints:
        """int64[T]: the place, among the n rows, of each place's row."""
        ...

    @property
    def on_host(self) -> KnownDrafts | None:
        """The drafts themselves, where the host knows them: constraints look ahead along these."""
        ...

    def spread(self, sampling: SamplingBatch) -> SamplingBatch:
        """The options of T places, given those of n rows. Places that may count and have a constraint are in it."""
        ...

    def entries(self, rows: Ints, staging: Staging) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(row, position, id) of the tokens that are tried, int64[T] each, on the device.

        `rows`, int64[n]: the pool's row of each row. A place that does not count is of row 0.
        """
        ...

    def sampled_at(self, rows: Ints, staging: Staging) -> tuple[torch.Tensor, torch.Tensor]:
        """(row, and tokens before) of the tokens to be sampled, int64[T] each, on the device. `rows`: see `entries`."""
        ...

    def judge(self, sampled: torch.Tensor, most: Ints | None, staging: Staging) -> Judgement:
        """What becomes of the drafts, given the tokens `sampled` behind each place, int64[T] on the device.

        `most`, int64[n]: at how many places of each row a token may count; None for all.
        """
        ...


class Outcome(Protocol):
    """How far each of n rows came. Its arrays can be read once the copies of the step are done."""

    @property
    def starts(self) -> Ints:
        """int64[n]: the place, among T, of the newest token of each row."""
        ...

    @property
    def counts(self) -> Ints:
        """int64[n]: tokens that each row got: the drafts that were right, and one more."""
        ...

    @property
    def proposed(self) -> Ints:
        """int64[n]: drafts that were tried."""
        ...

    @property
    def kept(self) -> Bools:
        """bool[T]: the places whose sampled tokens count."""
        ...

    @property
    def on_device(self) -> tuple[torch.Tensor, ...]:
        """What of it is on the device; empty if it is known on the host."""
        ...

    def fetched(self, host: Sequence[torch.Tensor]) -> Outcome:
        """The same with `host`, which a copy fills, in place of each of `on_device`."""
        ...


@dataclass(frozen=True, slots=True)
class Judgement:
    """An outcome, and what the next step needs of it, on the device; int64[n] each."""

    outcome: Outcome
    lens: torch.Tensor
    """Tokens of each row in the pools after the step that count."""
    newest: torch.Tensor
    """The last token that counts of each row."""
