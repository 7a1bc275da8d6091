"""How a drafter that computes logits says its drafts: as the model that verifies them will sample.

A draft counts only where it is the very token that is sampled. So a row that samples at random is drafted for with the
same options and the same random number of each place: two distributions that are close then give the same token more
often than two independent draws would. What depends on more text is left out: penalties, biases and grammars.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np
import torch

from core.batch.sampling_batch import PER_ROW, SamplingBatch
from core.sampling.places import Places
from core.sampling.sampler import Sampler
from core.sampling.uniform import uniforms
from core.types.arrays import Floats, Ints

NONE: Final[Ints] = np.empty(0, np.int64)


class Voice:
    """Of S rows in one step."""

    def __init__(self, sampler: Sampler, sampling: SamplingBatch, origins: Ints) -> None:
        """`origins`, int64[S]: see `core.sampling.uniform`."""
        self._sampler = sampler
        self._sampling = _without_text(sampling)
        self._origins = origins

    def say(self, logits: torch.Tensor, at: Ints, lens: Ints) -> tuple[Ints, Floats]:
        """(tokens int64[n], their probabilities float32[n]) of the rows `at`, behind `lens` tokens; int64[n] both.

        `logits`: contiguous float32[n, V], which this modifies. A probability is the drafter's own, at the temperature
        of the row.
        """
        sampling = self._sampling if len(at) == len(self._sampling) else _of(self._sampling, at)
        if sampling.all_greedy:
            tops, first = logits.max(-1)
            return first.numpy(), (tops - logits.logsumexp(-1)).exp_().numpy()
        numbers = uniforms(self._origins[at], lens)
        places = Places(torch.from_numpy(lens), torch.from_numpy(numbers))
        tokens = self._sampler.sample(logits, sampling, places).tokens
        # By now the logits of rows that sample at random were divided by their temperatures.
        chosen = logits.gather(1, tokens[:, None])[:, 0]
        return tokens.numpy(), (chosen - logits.logsumexp(-1)).exp().numpy()


def _without_text(sampling: SamplingBatch) -> SamplingBatch:
    return replace(
        sampling,
        bias_rows=NONE,
        bias_tokens=NONE,
        bias_values=NONE.astype(np.float32),
        bias_from=NONE,
        bias_until=NONE,
        any_penalty=False,
        logprobs=False,
        top_logprobs=0,
        constrained=NONE,
        alternatives=None,
        chosen=None,
    )


def _of(sampling: SamplingBatch, at: Ints) -> SamplingBatch:
    """The rows `at` of options without text."""
    taken = {name: getattr(sampling, name)[at] for name in PER_ROW}
    return replace(sampling, **taken, all_greedy=not (taken["temperatures"] > 0).any())
