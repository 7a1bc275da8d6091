"""Sampling options of one step, as host arrays aligned with the rows that sample in it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from core.batch.ragged import starts_of, walk_runs
from core.types.arrays import Floats, Ints

PER_ROW = (
    *("rows", "temperatures", "top_ks", "top_ps", "min_ps", "uniforms", "prompt_lens", "lower_lens", "upper_lens"),
    *("repetition_penalties", "frequency_penalties", "presence_penalties"),
)
"""Arrays of a `SamplingBatch` with one entry per row, whatever its options."""
PER_BIAS = ("bias_tokens", "bias_values", "bias_from", "bias_until")
"""Arrays with one entry per bias, beside its row."""


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """S rows sample in this step; every array below has length S unless it says otherwise.

    Nothing here depends on what is still on the device, tokens or lengths, so the arrays can be built while the
    previous step runs. `core.sampling.places` says where the rows stand; penalties read the device-side token history.
    """

    rows: Ints
    """Request-pool rows, int64."""
    temperatures: Floats
    """0 marks a greedy row."""
    top_ks: Ints
    """0 means off."""
    top_ps: Floats
    min_ps: Floats
    uniforms: npt.NDArray[np.float64]
    """float64[S, W] in [0, 1): the one random number of each row at length `lower_lens`, at the next, and so on, as far
    as any row may be. Of no use, and [S, 1], where all rows are greedy."""
    repetition_penalties: Floats
    frequency_penalties: Floats
    presence_penalties: Floats
    prompt_lens: Ints
    """Tokens of the original prompt: the border between prompt and output in the token history."""
    lower_lens: Ints
    """The least number of tokens of prompt and output that may come before the one sampled now."""
    upper_lens: Ints
    """The most."""
    bias_rows: Ints
    """Any length: indices into S of `bias_values` (logit bias, and -inf for stop tokens below min_tokens)."""
    bias_tokens: Ints
    bias_values: Floats
    bias_from: Ints
    """The least length of its row at which each bias counts: what is forced or forbidden depends on the place."""
    bias_until: Ints
    """The least length from there at which it counts no more."""
    all_greedy: bool
    any_top_k: bool
    any_top_p: bool
    any_min_p: bool
    any_penalty: bool
    logprobs: bool
    """Whether any row wants the log probability of its sampled token."""
    top_logprobs: int
    """The most alternatives that any row wants; 0 for none."""
    constrained: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    """int64[G]: indices into S of rows with a grammar. Their masks depend on the token before."""
    alternatives: Ints | None = None
    """int64[S]: alternatives that each row wants, -1 for a row that wants no log probability; None if no row wants any.
    """
    chosen: Ints | None = None
    """int64[S, C]: ids whose log probabilities each row wants, id 0 behind its last; None if no row wants any."""

    def __len__(self) -> int:
        return len(self.rows)

    def spread(self, counts: Ints) -> SamplingBatch:
        """The options of `counts[i]` places for each row i, int64[S], row after row.

        What of the biases counts at each of them, its length decides. All places of a constrained row are constrained.
        """
        each = np.arange(len(self)).repeat(counts)
        columns = {name: getattr(self, name)[each] for name in PER_ROW}
        if self.alternatives is not None:
            columns["alternatives"] = self.alternatives[each]
        if self.chosen is not None:
            columns["chosen"] = self.chosen[each]
        if len(self.bias_rows):
            entries, behind = walk_runs(counts[self.bias_rows])
            columns |= {name: getattr(self, name)[entries] for name in PER_BIAS}
            columns["bias_rows"] = starts_of(counts)[self.bias_rows][entries] + behind
        if len(self.constrained):
            followed, ahead = walk_runs(counts[self.constrained])
            columns["constrained"] = starts_of(counts)[self.constrained][followed] + ahead
        return replace(self, **columns)
