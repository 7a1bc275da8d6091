"""Our sampling kernels without Triton: the plain sampler, told of rows by the tables that a launch is given, alone.

What a table says wrongly of a row, or leaves out, so shows in the row's tokens.
"""

from __future__ import annotations

import numpy as np
import torch

from core.batch.grammar_batch import TokenMask
from core.batch.sampling_batch import SamplingBatch
from core.sampling.penalties import TokenHistory
from core.sampling.places import Places
from core.sampling.sampler import Sampler
from core.sampling.triton.options import Float, Whole

Table = torch.Tensor | None


def normalise(
    logits: torch.Tensor, wanted: torch.Tensor, raw: torch.Tensor, ids: torch.Tensor, values: torch.Tensor
) -> None:
    """See `core.sampling.triton.raw`."""
    raw[:, 0] = logits.max(-1).values
    raw[:, 1] = logits.logsumexp(-1) - raw[:, 0]
    best = logits.sort(stable=True, dim=-1, descending=True)
    width = ids.shape[1]
    asked = torch.arange(width) < wanted[:, None]
    ids.copy_(best.indices[:, :width] * asked)
    values.copy_((best.values[:, :width] - raw.sum(1, keepdim=True)) * asked)


def sample_rows(
    logits: torch.Tensor,
    lens: torch.Tensor,
    uniforms: torch.Tensor,
    floats: Table,
    whole: Table,
    top_ps: Table,
    entries: Table,
    values: Table,
    saved: Table,
    history: Table,
    scratch: Table,
    words: Table,
    normalisers: Table,
    tokens: torch.Tensor,
    non_finite: torch.Tensor,
    logprobs: Table,
    random: bool,
) -> None:
    """See `core.sampling.triton.rows`."""
    raw, told = logits.clone(), Told(len(logits), floats, whole, top_ps)
    batch = told.batch(lens, random, history is not None, entries, values)
    mask = None if words is None else told.mask(words)
    known = None if history is None else TokenHistory(history)
    places = Places(lens, uniforms if random else torch.empty(0, dtype=torch.float64))
    found = Sampler(logits.shape[1], logits.device).sample(logits, batch, places, known, mask)
    tokens.copy_(found.tokens)
    non_finite.copy_(found.non_finite)
    if logprobs is not None:
        assert normalisers is not None, "log probabilities have their sums"
        logprobs.copy_(raw.gather(1, tokens[:, None])[:, 0] - normalisers.sum(1))


class Told:
    """What the tables say of each row; what is not there, no row has."""

    def __init__(self, rows: int, floats: Table, whole: Table, top_ps: Table) -> None:
        self.rows = rows
        self.floats = np.zeros((len(Float), rows), np.float32) if floats is None else floats.numpy()
        self.whole = np.full((len(Whole), rows), -1) if whole is None else whole.numpy()
        self.top_ps = np.ones(rows, np.float32) if top_ps is None else top_ps.numpy().astype(np.float32)

    def batch(self, lens: torch.Tensor, random: bool, counted: bool, entries: Table, values: Table) -> SamplingBatch:
        """The options. `counted`: penalties are, of the rows that have a slot."""
        warm = self.floats[Float.TEMPERATURE] * random
        top_ks, floors = self.whole[Whole.TOP_K].clip(0), self.floats[Float.FLOOR]
        has = (self.whole[Whole.SLOT] >= 0) & counted
        penalties = (
            np.where(has, self.floats[line], np.float32(line is Float.REPETITION))
            for line in (Float.REPETITION, Float.FREQUENCY, Float.PRESENCE)
        )
        return SamplingBatch(
            *(self.whole[Whole.ROW].clip(0), warm, top_ks, self.top_ps),
            *(np.exp(floors.astype(np.float64)).astype(np.float32), np.zeros((self.rows, 1)), *penalties),
            *(self.whole[Whole.PROMPT], lens.numpy(), lens.numpy(), *self._biases(entries, values)),
            all_greedy=not (warm > 0).any(),
            any_top_k=bool((top_ks > 0).any()),
            any_top_p=bool((self.top_ps < 1).any()),
            any_min_p=bool((floors > -np.inf).any()),
            any_penalty=bool(has.any()),
            logprobs=False,
            top_logprobs=0,
        )

    def mask(self, words: torch.Tensor) -> TokenMask:
        """That of the rows that have one."""
        places = np.flatnonzero(self.whole[Whole.MASK] >= 0)
        return TokenMask(places, words.numpy()[self.whole[Whole.MASK, places]])

    def _biases(self, entries: Table, values: Table) -> tuple[np.ndarray, ...]:
        """Rows, tokens, values, and the lengths from which and until which each counts."""
        if entries is None or values is None:
            none = np.empty(0, np.int64)
            return none, none, none.astype(np.float32), none, none
        ends = self.whole[Whole.BIAS_END] - self.whole[Whole.BIAS_FROM]
        tokens, first, last = entries.numpy()
        return np.arange(self.rows).repeat(ends), tokens, values.numpy(), first, last
