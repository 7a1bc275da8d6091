"""What a step computes to verify drafts: for each row its newest token and the drafts behind it.

Ragged, on the host's own memory: on the CPU a place that is not computed costs nothing. An accelerator computes a
`grid`, since it must not wait to learn how many drafts there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from core.batch.ragged import starts_of, walk_runs
from core.batch.sampling_batch import SamplingBatch
from core.device.staging import Staging
from core.speculation.drafter import Drafts
from core.speculation.verification import Judgement
from core.types.arrays import Bools, Ints


@dataclass(frozen=True, slots=True)
class Trial:
    """T tokens of n rows, row after row; int64 arrays on the host. `Tried`."""

    lens: Ints
    """[n]: tokens of each row in the pools before the step."""
    counts: Ints
    """[n]: tokens of each row in this step, its newest one and its drafts."""
    starts: Ints
    """[n]: the place, among the T tokens, of each row's newest one."""
    row_of: Ints
    """[T]: the place, among the n rows, of each token's row."""
    ids: Ints
    """[T]."""
    positions: Ints
    """[T]: the place of each token in its own sequence."""

    @classmethod
    def of(cls, newest: Ints, lens: Ints, drafts: Drafts, room: Ints, vocab_size: int) -> Trial:
        """The tokens of n rows with `newest` behind `lens` tokens, int64[n] each.

        `room`, int64[n]: the most drafts that each may try; below 0 counts as 0. Drafts end before one that is no token
        of the model.
        """
        width = drafts.ids.shape[1]
        known = (drafts.ids >= 0) & (drafts.ids < vocab_size)
        legal = np.where(known.all(axis=1), width, known.argmin(axis=1))
        counts = np.minimum(np.minimum(drafts.lens, room), legal).clip(0) + 1
        row_of, behind = walk_runs(counts)
        ids = np.concatenate([newest[:, None], drafts.ids], axis=1)[row_of, behind]
        return cls(lens, counts, starts_of(counts), row_of, ids, lens[row_of] + behind)

    @property
    def on_host(self) -> Trial:
        """See `Tried`."""
        return self

    def spread(self, sampling: SamplingBatch) -> SamplingBatch:
        """See `Tried`."""
        return sampling.spread(self.counts)

    def entries(self, rows: Ints, staging: Staging) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `Tried`."""
        of, positions, ids = staging.upload([rows[self.row_of], self.positions, self.ids])
        return of, positions, ids

    def sampled_at(self, rows: Ints, staging: Staging) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Tried`."""
        of, lens = staging.upload([rows[self.row_of], self.positions + 1])
        return of, lens

    def judge(self, sampled: torch.Tensor, most: Ints | None, staging: Staging) -> Judgement:
        """See `Tried`."""
        found = sampled.numpy()
        verdict = self.judged(found, most)
        # On the host all of it: an operation on tensors would let go of the interpreter.
        lens, newest = staging.upload([verdict.lens, found[verdict.last]])
        return Judgement(verdict, lens, newest)

    def judged(self, sampled: Ints, most: Ints | None = None) -> Verdict:
        """What becomes of the drafts, given the tokens `sampled` behind each of the T places.

        A draft is right where it is the token that was sampled before it; behind the first wrong one nothing counts.
        `most`, int64[n]: at how many places of each row a token may count, at least 1; None for all.
        """
        right: Bools = np.zeros(len(self.ids), np.bool_)
        right[:-1] = (sampled[:-1] == self.ids[1:]) & (self.row_of[:-1] == self.row_of[1:])
        if most is not None:
            right &= self.positions - self.lens[self.row_of] + 1 < most[self.row_of]
        # The last place of each row is never right, so each row has one that is not.
        ends = np.flatnonzero(~right)
        return Verdict.of(self, ends[np.searchsorted(ends, self.starts)])


@dataclass(frozen=True, slots=True)
class Verdict:
    """How far each of n rows came. `Outcome`, and known at once."""

    trial: Trial
    last: Ints
    """int64[n]: the place, among the T tokens, behind which each row's newest token was sampled."""
    counts: Ints
    """int64[n]: tokens that each row got: the drafts that were right, and one more."""
    kept: Bools
    """bool[T]: the places whose sampled tokens count."""

    @classmethod
    def of(cls, trial: Trial, last: Ints) -> Verdict:
        """The rows of `trial` came as far as `last`."""
        kept: Bools = np.arange(len(trial.ids)) <= last[trial.row_of]
        return cls(trial, last, last - trial.starts + 1, kept)

    @property
    def starts(self) -> Ints:
        """See `Trial`."""
        return self.trial.starts

    @property
    def proposed(self) -> Ints:
        """int64[n]: drafts that were tried."""
        return self.trial.counts - 1

    @property
    def lens(self) -> Ints:
        """int64[n]: tokens of each row in the pools after the step that count."""
        return self.trial.lens + self.counts

    @property
    def on_device(self) -> tuple[torch.Tensor, ...]:
        """See `Outcome`: all of it is on the host."""
        return ()

    def fetched(self, host: Sequence[torch.Tensor]) -> Verdict:
        """See `Outcome`."""
        return self
