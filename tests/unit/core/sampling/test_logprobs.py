"""Log probabilities are the model's own, exact, and independent of what neighbours ask for."""

from __future__ import annotations

import numpy as np
import torch

from core.sampling.logprobs import leading_ids, pick_logprobs, raw_logprobs
from tests.unit.core.sampling.batches import Row, sample


def test_exact_over_the_whole_vocabulary() -> None:
    logits = torch.randn(3, 50_000, generator=torch.Generator().manual_seed(0)) * 4
    tokens = torch.tensor([0, 123, 49_999])
    found = pick_logprobs(raw_logprobs(logits), tokens, None).values
    expected = logits.double().log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-5)


def test_from_the_raw_logits() -> None:
    """Bias, penalties, temperature and filters change the token, not the probabilities that are reported."""
    logits = torch.randn(100, generator=torch.Generator().manual_seed(1))
    plain = sample([Row(logits, temperature=0.0)], logprobs=True, top_logprobs=5)
    bent = sample(
        [Row(logits, temperature=0.5, top_k=1, repetition=1.9, prompt=(3, 4), bias=((7, 90.0),))],
        logprobs=True,
        top_logprobs=5,
    )
    assert bent.tokens.tolist() == [7]
    assert plain.top_ids is not None and bent.top_ids is not None
    assert torch.equal(plain.top_ids, bent.top_ids)
    assert bent.logprobs is not None
    torch.testing.assert_close(bent.logprobs[0], logits.log_softmax(-1)[7])


def test_of_chosen_ids_too() -> None:
    """Also of those that a bias forbids, and of one that is chosen twice."""
    logits = torch.randn(2, 100, generator=torch.Generator().manual_seed(3))
    chosen = np.array([[99, 0, 7, 7], [1, 2, 0, 0]])
    rows = [Row(logits[0], temperature=0.5, prompt=(7,), repetition=1.9, bias=((7, -100.0),)), Row(logits[1])]
    found = sample(rows, logprobs=True, chosen=chosen)
    assert found.chosen is not None and found.top_ids is None
    assert torch.equal(found.chosen, raw_logprobs(logits).gather(1, torch.from_numpy(chosen)))
    beside = sample(rows, logprobs=True, top_logprobs=3, chosen=chosen)
    assert beside.top_ids is not None and beside.top_ids.shape == (2, 3)
    assert beside.chosen is not None and torch.equal(beside.chosen, found.chosen)
    assert sample(rows, logprobs=True).chosen is None and sample(rows).chosen is None


def test_alternatives_fall_and_ties_list_lower_ids_first() -> None:
    logits = torch.zeros(1, 300)
    logits[0, [250, 20]] = 2.0
    logits[0, 100] = -0.0
    logprobs = raw_logprobs(logits)
    for top in (1, 2, 5, 300):
        found = pick_logprobs(logprobs, torch.tensor([0]), leading_ids(logprobs, top))
        assert found.top_ids is not None and found.top_values is not None
        expected = [20, 250, *(i for i in range(300) if i not in (20, 250))][:top]
        assert found.top_ids[0].tolist() == expected
        assert torch.equal(found.top_values[0], logprobs[0, found.top_ids[0]])


def test_against_a_sort() -> None:
    logprobs = raw_logprobs(torch.randn(8, 999, generator=torch.Generator().manual_seed(2)).bfloat16().float())
    found = pick_logprobs(logprobs, torch.zeros(8, dtype=torch.int64), leading_ids(logprobs, 20))
    assert found.top_ids is not None
    assert torch.equal(found.top_ids, logprobs.sort(dim=-1, descending=True, stable=True).indices[:, :20])


def test_not_computed_unless_asked() -> None:
    found = sample([Row(torch.zeros(10))])
    assert found.logprobs is None and found.top_ids is None and found.top_values is None
    assert sample([Row(torch.zeros(10))], logprobs=True).top_ids is None
