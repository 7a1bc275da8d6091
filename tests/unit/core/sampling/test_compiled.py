"""Compiled sampling gives the tokens of `Sampler`, row by row, whatever logits and options are."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from core.native.host import HOST
from core.native.kept_library import ExtensionUnavailable
from core.sampling.compiled import CompiledSampler, takes
from core.sampling.sampler import Sampler
from tests.unit.core.sampling.batches import CPU, Row, batch_of, places_of


def compiled(vocab: int) -> CompiledSampler:
    try:
        return CompiledSampler(HOST.load(), vocab)
    except ExtensionUnavailable as reason:
        pytest.skip(f"no native code here: {reason}")


def same(rows: list[Row]) -> None:
    """Both ways give the same tokens and flags, and the compiled one leaves the logits as they were."""
    vocab = len(rows[0].logits)
    logits, batch = torch.stack([row.logits for row in rows]), batch_of(rows)
    given = logits.clone()
    found = compiled(vocab).sample(logits, batch, places_of(rows).lens)
    assert torch.equal(logits.nan_to_num(7.0), given.nan_to_num(7.0))
    wanted = Sampler(vocab, CPU).sample(given, batch, places_of(rows))
    assert found.non_finite.tolist() == wanted.non_finite.tolist()
    assert found.tokens.tolist() == wanted.tokens.tolist()
    assert found.tokens.dtype == torch.int64 and found.non_finite.dtype == torch.bool


def random_logits(rng: np.random.Generator, vocab: int) -> torch.Tensor:
    kind = rng.integers(6)
    values = rng.normal(0, rng.choice([0.01, 1, 4, 30]), vocab)
    if kind == 1:
        values = np.round(values)  # ties, at every threshold
    elif kind == 2:
        values[rng.random(vocab) < rng.choice([0.5, 0.99])] = -np.inf
    elif kind == 3:
        values[rng.integers(vocab)] = rng.choice([np.nan, np.inf])
    elif kind == 4:
        values = np.full(vocab, rng.choice([0.0, -0.0, 3.5, -np.inf]))
    return torch.from_numpy(values.astype(np.float32))


def random_row(rng: np.random.Generator, vocab: int) -> Row:
    return Row(
        random_logits(rng, vocab),
        temperature=float(rng.choice([0, 1e-9, 0.2, 1.0, 5.0])),
        top_k=int(rng.choice([0, 0, 1, 2, 50, vocab - 1, vocab, vocab + 5])),
        top_p=float(rng.choice([1.0, 1.0, 1e-6, 0.3, 0.9, 0.999])),
        min_p=float(rng.choice([0.0, 0.0, 0.05, 1.0])),
        uniform=float(rng.choice([0.0, rng.random(), rng.random(), 1 - 2**-53])),
    )


@pytest.mark.parametrize("vocab", [1, 3, 16, 127, 128, 1000, 5003])
def test_random_rows_get_the_same_tokens(vocab: int, seed: int) -> None:
    rng = np.random.default_rng([seed, vocab])
    for _ in range(12):
        same([random_row(rng, vocab) for _ in range(int(rng.integers(1, 48)))])


def test_more_rows_than_the_cache_holds_at_a_time(seed: int) -> None:
    rng = np.random.default_rng(seed)
    same([random_row(rng, 40_000) for _ in range(30)])


@pytest.mark.parametrize("place", [0, 1, 15, 16, 17, 32, 36])
def test_the_first_of_equal_logits_is_taken(place: int) -> None:
    logits = torch.zeros(37)
    logits[[place, 36]] = 2.0
    same([Row(logits, temperature=0.0)])
    assert (
        compiled(37).sample(logits[None], batch_of([Row(logits, 0.0)]), places_of([Row(logits)]).lens).tokens == place
    )


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, 20, 36])
def test_rows_that_are_not_finite_are_seen(bad: float, place: int) -> None:
    logits = torch.arange(37.0)
    logits[place] = bad
    rows = [Row(logits, temperature) for temperature in (0.0, 1.0)] + [Row(torch.arange(37.0), 0.0)]
    found = compiled(37).sample(torch.stack([row.logits for row in rows]), batch_of(rows), places_of(rows).lens)
    assert found.non_finite.tolist() == [True, True, False] and found.tokens.tolist() == [0, 0, 36]


def test_other_options_are_left_to_the_sampler() -> None:
    plain = Row(torch.zeros(5), 0.7, top_k=2, top_p=0.5, min_p=0.1)
    assert takes(batch_of([plain]))
    assert not takes(batch_of([plain], logprobs=True))
    assert not takes(batch_of([plain, Row(torch.zeros(5), bias=((1, 2.0),))]))
    assert not takes(batch_of([plain, Row(torch.zeros(5), repetition=1.1)]))


def test_a_small_top_k_among_many_tokens(seed: int) -> None:
    """Each k of a few dozen, over logits with and without ties: one token more or less would show in the draws."""
    rng = np.random.default_rng(seed)
    for step in (0.0, 0.125):
        rows = []
        for k in range(2, 66):
            logits = rng.normal(0, 1, 9000).astype(np.float32)
            logits = np.round(logits / step) * step if step else logits
            top_p = float(rng.choice([1.0, 0.9]))
            rows.append(Row(torch.from_numpy(logits.astype(np.float32)), 2.0, k, top_p, uniform=float(rng.random())))
        same(rows)
