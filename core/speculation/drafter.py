"""The interface of what drafts, and the columns in which drafts wait on the device for the step that verifies them.

A draft is a guess and never changes an output: the step that verifies it samples the target model at every place, with
the place's own random number, and keeps a draft only where it is the very token that was sampled. This exact match
accepts as often as rejection sampling where the drafter is deterministic (Leviathan et al. 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from core.batch.forward_batch import ForwardBatch
from core.batch.hidden import HiddenRequest
from core.batch.sampling_batch import SamplingBatch
from core.batch.schedule_batch import ScheduleBatch
from core.batch.spec_plan import Aim
from core.relay.future_map import FutureMap
from core.relay.payload import Column
from core.types.arrays import Bools, Ints

DRAFTS, DRAFT_LEN = "drafts", "draft_len"
"""Names of the FutureMap's columns."""


def draft_columns(most: int) -> tuple[Column, Column]:
    """Up to `most` drafts for each row, and how many of them there are.

    The number says what is valid, never a token: an unwritten or forgotten row has 0, so what prefill leaves, and a row
    that is seeded from elsewhere, is safe.
    """
    return Column(DRAFTS, torch.int64, (most,), fill=-1), Column(DRAFT_LEN, torch.int64, fill=0)


@dataclass(frozen=True, slots=True)
class Computed:
    """What a step computed, for drafters that run a model over the same tokens. It is over when the drafter returns."""

    forward: ForwardBatch
    """The B rows and T tokens that the model ran over, in order, their places and slots, and the hidden states that the
    drafter asked for. Every slot in it belongs to its row; a slot that is not in it may not be written."""
    rows: Ints
    """[B] on the host: `forward.rows`."""
    kept: Bools | None
    """[T]: the tokens that count; None where all do. The others are drafts that were wrong, and behind them."""
    sampling: SamplingBatch
    """Options of the S rows that sampled, in the order of `Ran.rows`."""
    relay: FutureMap
    """For the columns that the drafter declares: `extra` reads what the step before left, `carry` leaves the next."""


@dataclass(frozen=True, slots=True)
class Ran:
    """What a step has given the S rows that sampled in it, on the host; int64 arrays.

    For `Drafter.hear` it may be several steps, one after the other, so that a row is there several times.
    """

    rows: Ints
    """[S]."""
    lens: Ints
    """[S]: tokens of each row in the pools. The newest token is not among them."""
    counts: Ints
    """[S]: how many tokens each row got."""
    tokens: Ints
    """[A]: the tokens, row after row."""
    computed: Computed | None = None
    """Set for drafters that run a model."""


@dataclass(frozen=True, slots=True)
class Drafts:
    """Drafts for S rows, on the host."""

    ids: Ints
    """int64[S, K]; what stands at and behind `lens` means nothing."""
    lens: Ints
    """int64[S], 0 to K."""


class Drafter(Protocol):
    """Used by the forward thread only, on the forward stream."""

    @property
    def columns(self) -> Sequence[Column]:
        """Columns of the FutureMap that it needs beside the drafts, and writes itself: hidden states, say."""
        ...

    @property
    def needs_hidden(self) -> HiddenRequest:
        """Which hidden states the model must give in every step; `NO_HIDDEN` for none."""
        ...

    @property
    def runs_model(self) -> bool:
        """Whether it runs a model of its own. It then hears of every step, also where no row sampled: of middle chunks
        of prompts, and of embeddings, whose rows are not among those that `begin` was told to draft for.
        """
        ...

    def begin(self, batch: ScheduleBatch) -> None:
        """Take note of the new owners of `batch`, before anything of it is computed."""
        ...

    def hear(self, ran: Ran) -> None:
        """Take note of what steps ran behind which no drafts are wanted. `ran` is kept as it is.

        A drafter that runs a model hears of each step by itself, and right behind it.
        """
        ...

    def draft(self, ran: Ran, aim: Aim) -> Drafts:
        """Take note of what a step ran, and draft what follows the newest token of each row of it.

        Either this or `hear` is called for every step that samples, behind the event that publishes its lengths. Where
        `aim.most` is 0 it is `hear`, which must not take the time of a model for rows that decode. A wrong draft costs
        time and nothing else. An id that the model has not ends the drafts of its row there.
        """
        ...


@runtime_checkable
class Rehearsing(Protocol):
    """A drafter whose model launches kernels: on padding first, so that none is compiled while requests wait."""

    def rehearse(self, forward: ForwardBatch, relay: FutureMap) -> None:
        """Run over what the target has run over, whose rows are all row 0, and over one draft behind each of them.

        Writes to slot 0 alone, and nothing to `relay` (law 6).
        """
        ...
