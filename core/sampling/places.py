"""Where the tokens that a step samples stand in their sequences, which is known on the forward stream first."""

from __future__ import annotations

from dataclasses import dataclass

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

    @classmethod
    def of(cls, batch: SamplingBatch, lens: torch.Tensor, staging: Staging) -> Places:
        """The places of the rows of `batch` at `lens`, int64[S] (law 13)."""
        if batch.all_greedy:
            return cls(lens, lens.new_empty(0, dtype=torch.float64))
        if batch.uniforms.shape[1] == 1:
            (numbers,) = staging.upload([batch.uniforms])
            return cls(lens, numbers[:, 0])
        numbers, lower = staging.upload([batch.uniforms, batch.lower_lens])
        return cls(lens, numbers.gather(1, (lens - lower)[:, None])[:, 0])

    def part(self, places: slice) -> Places:
        """Some of them; tensors are views."""
        return Places(self.lens[places], self.uniforms[places])

    def take(self, index: torch.Tensor) -> Places:
        """Those at `index`, int64[n], of a batch that is not greedy."""
        return Places(self.lens.index_select(0, index), self.uniforms.index_select(0, index))
