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

    def __len__(self) -> int:
        return len(self.rows)

    def spread(self, counts: Ints) -> SamplingBatch:
        """The options of `counts[i]` places for each row i, int64[S], row after row.

        What of the biases counts at each of them, its length decides. All places of a constrained row are constrained.
        """
        starts, each = starts_of(counts), np.repeat(np.arange(len(self)), counts)
        entries, behind = walk_runs(counts[self.bias_rows])
        followed, ahead = walk_runs(counts[self.constrained])
        return replace(
            self,
            **{name: getattr(self, name)[each] for name in PER_ROW},
            bias_rows=starts[self.bias_rows][entries] + behind,
            bias_tokens=self.bias_tokens[entries],
            bias_values=self.bias_values[entries],
            bias_from=self.bias_from[entries],
            bias_until=self.bias_until[entries],
            constrained=starts[self.constrained][followed] + ahead,
            alternatives=None if self.alternatives is None else self.alternatives[each],
        )
