"""The options of a step's rows as the kernel reads them: a few tables, made on the host and sent in one transfer."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from core.batch.sampling_batch import SamplingBatch
from core.sampling.cutoff import Filters
from core.sampling.penalties import MIN_REPETITION_PENALTY, has_penalty
from core.sampling.sampler import MIN_TEMPERATURE
from core.types.arrays import Floats, Ints


class Float(IntEnum):
    """Lines of `Options.floats`."""

    TEMPERATURE = 0
    """0 for greedy rows, at least MIN_TEMPERATURE for others."""
    FLOOR = 1
    """Logarithm of min-p."""
    REPETITION = 2
    FREQUENCY = 3
    PRESENCE = 4


class Whole(IntEnum):
    """Lines of `Options.whole`."""

    TOP_K = 0
    """0 for off."""
    ROW = 1
    """Of the request pool."""
    PROMPT = 2
    """Tokens of the prompt."""
    SLOT = 3
    """Which of the places with a penalty this is, -1 for none of them."""
    MASK = 4
    """Which of the token masks it has, -1 for none."""
    BIAS_FROM = 5
    """Its first bias among all."""
    BIAS_END = 6


@dataclass(frozen=True, slots=True)
class Options:
    """Host arrays of S rows; those with a dimension of 0 are of no use to any of them."""

    floats: Floats
    """float32[len(Float), S]."""
    whole: Ints
    """int64[len(Whole), S]."""
    top_ps: npt.NDArray[np.float64]
    """float64[S]; 1 for off."""
    entries: Ints
    """int64[3, E]: token of each bias, least length at which it counts, and least length at which it no longer does."""
    values: Floats
    """float32[E]: the biases, in the order of their rows."""
    penalised: int
    """Places with a penalty."""

    @property
    def arrays(self) -> list[npt.NDArray[Any]]:
        """What is sent."""
        return [self.floats, self.whole, self.top_ps, self.entries, self.values]

    @classmethod
    def of(cls, batch: SamplingBatch, masked: Ints, vocab: int) -> Options:
        """The options of `batch` for `vocab` tokens. `masked`, int64[G]: its rows that have a mask, in order."""
        count = len(batch)
        filters = Filters.of(batch.top_ks, batch.top_ps, batch.min_ps, vocab)
        warm = np.maximum(batch.temperatures, np.float32(MIN_TEMPERATURE))
        floats = np.empty((len(Float), count), np.float32)
        floats[Float.TEMPERATURE] = np.where(batch.temperatures > 0, warm, 0.0)
        floats[Float.FLOOR] = filters.floors
        floats[Float.REPETITION] = np.maximum(batch.repetition_penalties, np.float32(MIN_REPETITION_PENALTY))
        floats[Float.FREQUENCY] = batch.frequency_penalties
        floats[Float.PRESENCE] = batch.presence_penalties
        whole = np.full((len(Whole), count), -1)
        whole[Whole.TOP_K], whole[Whole.ROW], whole[Whole.PROMPT] = filters.top_ks, batch.rows, batch.prompt_lens
        places = np.flatnonzero(has_penalty(batch) & (batch.upper_lens > 0)) if batch.any_penalty else _NONE
        whole[Whole.SLOT, places] = np.arange(len(places))
        whole[Whole.MASK, masked] = np.arange(len(masked))
        # Stable: the biases of a token are added in the order in which they came.
        order = np.argsort(batch.bias_rows, kind="stable")
        ends = np.bincount(batch.bias_rows, minlength=count).cumsum()
        whole[Whole.BIAS_END], whole[Whole.BIAS_FROM, 1:], whole[Whole.BIAS_FROM, :1] = ends, ends[:-1], 0
        entries = np.stack([batch.bias_tokens, batch.bias_from, batch.bias_until])[:, order]
        values = batch.bias_values[order]
        return cls(floats, whole, filters.top_ps, np.ascontiguousarray(entries), values, len(places))


_NONE: Ints = np.empty(0, np.int64)
