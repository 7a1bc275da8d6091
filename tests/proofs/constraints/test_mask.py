"""Masks on logits: what is forbidden stays so, and rows without a mask keep every bit."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from core.batch.grammar_batch import TokenMask
from core.batch.sampling_batch import SamplingBatch
from core.device.staging import Staging
from core.sampling.grammar.mask import CACHED_LOGITS, _banned_on, _bounds, apply_mask
from core.sampling.places import Places
from core.sampling.sampler import Sampler
from tests.unit.core.sampling.batches import Row, batch_of, places_of

VOCAB = 100
CPU = torch.device("cpu")


def sampling_batch(rows: int) -> SamplingBatch:
    return batch_of([Row(torch.zeros(VOCAB))] * rows)


def places(count: int) -> Places:
    return places_of([Row(torch.zeros(VOCAB))] * count)


def mask_of(places: list[int], allowed: list[list[int]]) -> TokenMask:
    words = np.zeros((len(places), 4), np.int32)
    for row, tokens in enumerate(allowed):
        bits = np.zeros(128, np.bool_)
        bits[tokens] = True
        words[row] = np.packbits(bits, bitorder="little").view(np.int32)
    return TokenMask(np.array(places, np.int64), words)


def test_only_masked_rows_change() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    apply_mask(logits, mask_of([1], [[5, 31, 32, 99]]), Staging(CPU))
    assert torch.equal(logits[[0, 2]], before[[0, 2]])
    assert logits[1].isfinite().nonzero().flatten().tolist() == [5, 31, 32, 99]
    assert torch.equal(logits[1, [5, 31, 32, 99]], before[1, [5, 31, 32, 99]])


@pytest.mark.parametrize("rows", [5, 7])
def test_a_step_of_many_logits_is_masked_part_by_part(rows: int) -> None:
    """The last rows of a large vocabulary are masked by their own bits, in a step of constrained rows alone or not."""
    vocab, places = CACHED_LOGITS // 2, list(range(rows - 5, rows))
    allowed = [[7 * row + 1, vocab - 1 - row] for row in range(5)]
    words = np.zeros((5, vocab // 32), np.int32)
    for row, tokens in enumerate(allowed):
        bits = np.zeros(vocab, np.bool_)
        bits[tokens] = True
        words[row] = np.packbits(bits, bitorder="little").view(np.int32)
    logits = torch.zeros(rows, vocab)
    apply_mask(logits, TokenMask(np.array(places, np.int64), words), Staging(CPU))
    assert [logits[place].isfinite().nonzero().flatten().tolist() for place in places] == allowed
    assert not logits[: rows - 5].any()


def test_the_device_unpacks_the_same_bits() -> None:
    rng = np.random.default_rng(1)
    words = rng.integers(-(2**31), 2**31, (5, 4), np.int64).astype(np.int32)
    assert torch.equal(torch.from_numpy(_bounds(words, VOCAB)) < 0, _banned_on(words, VOCAB, Staging(CPU)))


def test_bias_does_not_lift_the_mask_and_log_probabilities_are_the_models() -> None:
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(2))
    raw = logits.log_softmax(-1)
    batch = dataclasses.replace(
        sampling_batch(2),
        bias_rows=np.array([0], np.int64),
        bias_tokens=np.array([50], np.int64),
        bias_values=np.array([100.0], np.float32),
        bias_from=np.array([0]),
        bias_until=np.array([100]),
        logprobs=True,
    )
    out = Sampler(VOCAB, CPU).sample(logits, batch, places(2), None, mask_of([0, 1], [[3, 4], [7]]))
    assert out.tokens[0] in (3, 4) and out.tokens[1] == 7 and not out.non_finite.any()
    assert out.logprobs is not None
    assert torch.equal(out.logprobs, raw.gather(1, out.tokens[:, None])[:, 0])


def test_words_that_end_early_forbid_the_rest() -> None:
    logits = torch.zeros(2, 300)
    logits[:, 250] = torch.inf
    out = Sampler(300, CPU).sample(logits, sampling_batch(2), places(2), None, mask_of([0], [[5, 99]]))
    assert out.tokens[0] in (5, 99) and out.non_finite.tolist() == [False, True]


def test_a_row_of_which_nothing_is_left_is_told() -> None:
    logits = torch.randn(2, VOCAB)
    out = Sampler(VOCAB, CPU).sample(logits, sampling_batch(2), places(2), None, mask_of([0], [[]]))
    assert out.non_finite.tolist() == [True, False]
