"""Where the tokens that a step samples stand in their sequences, which is known on the forward stream first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch

from core.batch.sampling_batch import SamplingBatch
from core.device.staging import Staging


@dataclass(frozen=True, slots=True)
class Places:
    """The places of S tokens to be sampled, on the sampler's device."""

    lens: torch.Tensor
    """int64[S]: tokens of prompt and output before each: its position in its sequence."""
    uniforms: torch.Tensor
    """float64[S] in [0, 1): the one random number of each place. Of no use, and of any length, for a greedy batch."""

    @staticmethod
    def carried(batch: SamplingBatch) -> list[npt.NDArray[Any]]:
        """The arrays that `of` uploads."""
        if batch.all_greedy:
            return []
        return [batch.uniforms] if batch.uniforms.shape[1] == 1 else [batch.uniforms, batch.lower_lens]

    @classmethod
    def of(cls, batch: SamplingBatch, lens: torch.Tensor, staging: Staging) -> Places:
        """The places of the rows of `batch` at `lens`, int64[S] (law 13)."""
        if batch.all_greedy:
            return cls(lens, lens.new_empty(0, dtype=torch.float64))
        numbers, *lower = staging.upload(cls.carried(batch))
        return cls(lens, (numbers.gather(1, (lens - lower[0])[:, None]) if lower else numbers)[:, 0])

    def part(self, places: slice) -> Places:
        """Some of them; tensors are views."""
        return Places(self.lens[places], self.uniforms[places])

    def take(self, index: torch.Tensor) -> Places:
        """Those at `index`, int64[n], of a batch that is not greedy."""
        return Places(self.lens.index_select(0, index), self.uniforms.index_select(0, index))
