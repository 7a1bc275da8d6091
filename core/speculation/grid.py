"""What a step computes to verify drafts where lengths are on the device: a grid of K + 1 places a row, under a mask.

The host knows the width alone. A place counts where the device finds a draft for it; the others write to slot 0, and
what is sampled there is of no row (law 6). So a step waits for nothing, and can be captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from core.batch.sampling_batch import SamplingBatch
from core.device.staging import Staging
from core.speculation.verification import Judgement
from core.types.arrays import Bools, Ints


@dataclass(frozen=True, slots=True)
class Grid:
    """n rows of W places each; int64 tensors on the device. `Tried`: T is n * W."""

    rows: torch.Tensor
    """[n]: rows of the pool."""
    before: torch.Tensor
    """[n]: tokens of each row in the pools before the step."""
    tried: torch.Tensor
    """[n]: places of each row that count, from its first on: its newest token, and drafts behind it."""
    ids: torch.Tensor
    """[n, W]. Where a place does not count it is the newest token again."""

    @classmethod
    def of(
        cls,
        rows: torch.Tensor,
        newest: torch.Tensor,
        before: torch.Tensor,
        drafts: tuple[torch.Tensor, torch.Tensor],
        room: torch.Tensor,
        vocab_size: int,
    ) -> Grid:
        """The places of n rows, `rows` of the pool, with `newest` behind `before` tokens, int64[n] each.

        `drafts`: int64[n, W - 1], and how many of them there are, int64[n]; they end before one that is no token of the
        model. `room`, int64[n]: the most drafts that each may try; below 0 counts as 0.
        """
        ids, lens = drafts
        legal = ((ids >= 0) & (ids < vocab_size)).cumprod(1).sum(1)
        tried = torch.minimum(torch.minimum(lens, room), legal).clamp_min(0) + 1
        ids = torch.cat([newest[:, None], ids], 1)
        return cls(rows, before, tried, torch.where(_counts(tried, ids.shape[1]), ids, newest[:, None]))

    @property
    def width(self) -> int:
        """Places of each row."""
        return self.ids.shape[1]

    @property
    def mask(self) -> torch.Tensor:
        """bool[n, W]: the places that count."""
        return _counts(self.tried, self.width)

    @property
    def positions(self) -> torch.Tensor:
        """int64[T]: the place of each token in its own sequence. One that does not count stands where the newest does,
        so that whatever is looked up by it is there."""
        ahead = torch.arange(self.width, device=self.ids.device) * self.mask
        return (self.before[:, None] + ahead).view(-1)

    @property
    def counts(self) -> Ints:
        """See `Tried`: the same for all rows."""
        return np.full(len(self.ids), self.width)

    @property
    def row_of(self) -> Ints:
        """See `Tried`."""
        return np.repeat(np.arange(len(self.ids)), self.width)

    @property
    def on_host(self) -> None:
        """See `Tried`. So rows with a constraint try no drafts."""
        return None

    def spread(self, sampling: SamplingBatch) -> SamplingBatch:
        """See `Tried`."""
        return spread_over(sampling, self.width)

    def entries(self, rows: Ints, staging: Staging) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `Tried`."""
        return self._real, self.positions, self.ids.view(-1)

    def sampled_at(self, rows: Ints, staging: Staging) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Tried`."""
        return self._real, self.positions + 1

    def judge(self, sampled: torch.Tensor, most: Ints | None, staging: Staging) -> Judgement:
        """See `Tried`. Where places have constraints, none behind the first is tried, so `most` says nothing new."""
        sampled = sampled.view(-1, self.width)
        right = ((sampled[:, :-1] == self.ids[:, 1:]) & self.mask[:, 1:]).cumprod(1).sum(1)
        newest = sampled.gather(1, right[:, None])[:, 0]
        return Judgement(GridOutcome(self.width, torch.stack([right, self.tried - 1])), self.before + right + 1, newest)

    @property
    def _real(self) -> torch.Tensor:
        """int64[T]: the row of each place; 0 where it does not count."""
        return (self.rows[:, None] * self.mask).view(-1)


@dataclass(frozen=True, slots=True)
class GridOutcome:
    """An `Outcome` that comes to the host with the tokens."""

    width: int
    drafts: torch.Tensor
    """int64[2, n]: of each row the drafts that were right, and those that were tried."""

    @property
    def starts(self) -> Ints:
        """See `Outcome`."""
        return np.arange(self.drafts.shape[1]) * self.width

    @property
    def counts(self) -> Ints:
        """See `Outcome`."""
        counts: Ints = self.drafts[0].numpy() + 1
        return counts

    @property
    def proposed(self) -> Ints:
        """See `Outcome`."""
        proposed: Ints = self.drafts[1].numpy()
        return proposed

    @property
    def kept(self) -> Bools:
        """See `Outcome`."""
        kept: Bools = (np.arange(self.width) < self.counts[:, None]).reshape(-1)
        return kept

    @property
    def on_device(self) -> tuple[torch.Tensor, ...]:
        """See `Outcome`."""
        return (self.drafts,)

    def fetched(self, host: Sequence[torch.Tensor]) -> GridOutcome:
        """See `Outcome`."""
        (drafts,) = host
        return replace(self, drafts=drafts)


def spread_over(sampling: SamplingBatch, width: int) -> SamplingBatch:
    """The options of grids of `width` places a row, given those of rows. Of a constrained one the first place is."""
    counts: Ints = np.full(len(sampling), width)
    return replace(sampling.spread(counts), constrained=sampling.constrained * width)


def _counts(tried: torch.Tensor, width: int) -> torch.Tensor:
    """bool[n, width]: of each row the first `tried` places."""
    return torch.arange(width, device=tried.device) < tried[:, None]
