"""The options of a step's rows, repeated for the places at which each of them samples."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from core.batch.sampling_batch import PER_ROW, SamplingBatch
from core.sampling.penalties import apply_bias
from tests.unit.core.sampling.batches import Row, batch_of

VOCAB = 8


def rows() -> SamplingBatch:
    made = [
        Row(torch.zeros(VOCAB), temperature=0.5, bias=((1, 2.0), (2, 3.0))),
        Row(torch.zeros(VOCAB), top_k=3, output=(1, 2)),
        Row(torch.zeros(VOCAB), min_p=0.2, uniform=0.9, presence=1.0, bias=((5, -1.0),)),
    ]
    wanted = np.array([2, -1, 0])
    return replace(batch_of(made, logprobs=True, top_logprobs=2), constrained=np.array([1]), alternatives=wanted)


def test_each_place_has_the_options_of_its_row() -> None:
    batch, counts = rows(), np.array([2, 1, 3])
    spread, each = batch.spread(counts), [0, 0, 1, 2, 2, 2]
    assert len(spread) == 6
    for name in (*PER_ROW, "alternatives"):
        assert np.array_equal(getattr(spread, name), getattr(batch, name)[each]), name
    assert spread.constrained.tolist() == [2]
    every = replace(batch, constrained=np.array([0, 2])).spread(counts)
    assert every.constrained.tolist() == [0, 1, 3, 4, 5], "all places of a constrained row"
    logits, expected = torch.zeros(6, VOCAB), torch.zeros(3, VOCAB)
    apply_bias(expected, batch, torch.from_numpy(batch.upper_lens))
    apply_bias(logits, spread, torch.from_numpy(spread.upper_lens))
    assert torch.equal(logits, expected[each])


def test_one_place_each_changes_nothing() -> None:
    batch = rows()
    spread = batch.spread(np.ones(3, np.int64))
    for name in batch.__slots__:
        assert np.array_equal(getattr(spread, name), getattr(batch, name)), name
