"""Which tokens survive the filters and with what share, against the logits processors of `transformers`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from core.sampling.candidates import _cutoffs, descending, largest
from core.sampling.cutoff import DeviceFilters, Filters, SampledRows, dropped
from core.sampling.draw import draw, padded, weigh_by_exp, weigh_by_softmax
from tests.unit.core.sampling.batches import Row, sample, token_of

CASES = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 1},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_k": 63},
    {"temperature": 1.3, "top_k": 64},
    {"temperature": 2.0, "top_k": 200},
    {"temperature": 1.0, "top_k": 10_000},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 3.0, "top_p": 0.999},
    {"temperature": 1.0, "top_p": 0.01},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 4.0, "min_p": 0.001},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 1.0, "top_k": 40, "top_p": 0.8},
    {"temperature": 2.5, "top_k": 300, "top_p": 0.95, "min_p": 0.02},
    {"temperature": 1.0, "top_p": 0.7, "min_p": 0.3},
]


def _reference(row: Row) -> torch.Tensor:
    """float64[V] probabilities after the processors of `transformers`, in this project's order."""
    steps = LogitsProcessorList([TemperatureLogitsWarper(float(row.temperature))])
    if row.top_k:
        steps.append(TopKLogitsWarper(min(row.top_k, row.logits.numel())))
    if row.top_p < 1:
        steps.append(TopPLogitsWarper(row.top_p))
    if row.min_p:
        steps.append(MinPLogitsWarper(row.min_p))
    ids = torch.tensor([row.prompt + row.output])
    return steps(ids, row.logits[None].clone())[0].double().softmax(-1)


def _probes(probabilities: torch.Tensor) -> list[tuple[int, float]]:
    """(token, uniform) just inside both ends and in the middle of every token's stretch of the CDF."""
    ends = probabilities.cumsum(-1)
    found = []
    for token in torch.nonzero(probabilities > 2e-5)[:, 0].tolist():
        width = float(probabilities[token])
        start = float(ends[token]) - width
        found += [(token, start + share * width) for share in (0.05, 0.5, 0.95)]
    return found


@pytest.mark.parametrize("vocab", [300, 1000, 2048])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_token_has_its_stretch_of_the_cdf(case: dict[str, float], vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    base = Row(torch.randn(vocab, generator=generator) * 3, **case)  # type: ignore[arg-type]
    probes = _probes(_reference(base))
    rows = [replace(base, uniform=uniform) for _, uniform in probes]
    assert sample(rows).tokens.tolist() == [token for token, _ in probes]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("weigh", [weigh_by_softmax, lambda z: weigh_by_exp(z, z.amax(-1))], ids=["softmax", "exp"])
def test_bisection_keeps_what_transformers_keeps(case: dict[str, float], weigh) -> None:  # type: ignore[no-untyped-def]
    generator = torch.Generator().manual_seed(5)
    row = Row(torch.randn(1000, generator=generator) * 3, **case)  # type: ignore[arg-type]
    scaled = padded((row.logits / np.float32(row.temperature))[None])
    drops = _dropped([row], scaled, weigh(scaled))
    assert torch.equal(~drops[0, :1000], _reference(row) > 0)


def _dropped(rows: list[Row], scaled: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    filters = _filters(rows)
    on_device = DeviceFilters(
        torch.from_numpy(filters.top_ks), torch.from_numpy(filters.top_ps), torch.from_numpy(filters.floors)
    )
    return dropped(scaled, weights, scaled.amax(-1), on_device)


def _filters(rows: list[Row]) -> Filters:
    return Filters.of(
        np.array([row.top_k for row in rows], np.int64),
        np.array([row.top_p for row in rows], np.float32),
        np.array([row.min_p for row in rows], np.float32),
        rows[0].logits.numel(),
    )


def _random_rows(rng: np.random.Generator, vocab: int, count: int) -> list[Row]:
    """Peaked, flat, tied (bfloat16), clipped and mostly forbidden rows, with any mix of filters."""
    rows = []
    for _ in range(count):
        logits = torch.from_numpy(rng.normal(0, rng.choice([0.0, 0.02, 1.0, 5.0]), vocab)).float()
        shape = rng.integers(0, 4)
        if shape == 0:
            logits = logits.bfloat16().float()
        elif shape == 1:
            logits = logits.clamp(-1, 1)
        elif shape == 2:
            logits[torch.from_numpy(rng.random(vocab) < 0.97)] = -torch.inf
            logits[int(rng.integers(vocab))] = 0.0
        rows.append(
            Row(
                logits,
                temperature=float(rng.choice([0.1, 0.8, 1.0, 3.0])),
                top_k=int(rng.choice([0, 0, 1, 7, 64, 500, vocab])),
                top_p=float(rng.choice([1.0, 0.999999, 0.9, 0.3, 1e-6])),
                min_p=float(rng.choice([0.0, 0.0, 0.05, 0.9])),
                uniform=float(rng.choice([0.0, rng.random(), 1 - 2**-53])),
            )
        )
    return rows


@pytest.mark.parametrize("vocab", [1, 130, 1500, 9000])
def test_candidates_and_bisection_agree_exactly(vocab: int, seed: int) -> None:
    """The CPU's growing top-k and the accelerators' bisection pick the same token, ties and all."""
    rng = np.random.default_rng(seed)
    rows = [row for row in _random_rows(rng, vocab, 60) if row.top_k or row.top_p < 1 or row.min_p]
    temperatures = torch.tensor([row.temperature for row in rows])[:, None]
    scaled = padded(torch.stack([row.logits for row in rows]) / temperatures)
    weights = weigh_by_softmax(scaled)
    uniforms = torch.tensor([row.uniform for row in rows], dtype=torch.float64)
    drops = _dropped(rows, scaled, weights)
    expected = draw(weights.masked_fill(drops, 0.0), uniforms)
    assert sample(rows).tokens.tolist() == expected.tolist()


def test_sampler_on_an_accelerator_takes_the_same_tokens(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The accelerators' path of the whole sampler, run on the CPU, including rows without filters between others."""
    from core.sampling import sampler as module

    rng = np.random.default_rng(seed)
    rows = _random_rows(rng, 777, 50)
    rows += [replace(row, top_k=0, top_p=1.0, min_p=0.0) for row in rows[:20]]
    expected = sample(rows).tokens

    def by_bisection(sampled: SampledRows) -> torch.Tensor:
        return module.Sampler(777, torch.device("cpu"))._draw_by_bisection(sampled)

    monkeypatch.setattr(module, "draw_rows", by_bisection)
    assert torch.equal(sample(rows).tokens, expected)


def test_weights_of_an_accelerator_are_exponentials() -> None:
    """Made of sums and products alone: as near to the true ones as the logits that float32 can tell apart."""
    scaled = padded(torch.randn(4, 5000, generator=torch.Generator().manual_seed(2)) * 5)
    scaled[0, 7], scaled[1, :5000] = -3e38, 2.5
    tops = scaled.amax(-1)
    weights = weigh_by_exp(scaled, tops).double()
    below = scaled.double() - tops.double()[:, None]
    exact = below.exp() * 2.0**39
    assert ((weights - exact).abs() <= exact * (1.5e-7 + 1.2e-7 * below.abs().clamp(max=64)) + 1).all()
    assert weights.sum(-1).max() < 2.0**53 and (weights.amax(-1) == 2.0**39).all() and weights[0, 7] == 0


def test_ties_at_the_cutoff_stay_together() -> None:
    """Four equal logits, top-k 2: all four stay, with equal shares, whatever ids they have."""
    logits = torch.full((500,), -3.0)
    tied = [3, 77, 250, 499]
    logits[tied] = 1.0
    for kept in ({"top_k": 2}, {"top_p": 0.1}, {"min_p": 0.9}):
        row = Row(logits, **kept)  # type: ignore[arg-type]
        assert [token_of(row, u) for u in (0.1, 0.3, 0.6, 0.9)] == tied


def _both_ways(row: Row, weights: list[float]) -> list[list[int]]:
    """Kept tokens by candidates, by a sort, and by bisection, of a row whose weights are given."""
    vocab = row.logits.numel()
    scaled = padded(row.logits[None])
    given = torch.zeros_like(scaled)
    given[0, :vocab] = torch.tensor(weights)
    rows = SampledRows(scaled, given, scaled.amax(-1), torch.zeros(1, dtype=torch.float64), _filters([row]))
    by_candidates, done = _cutoffs(rows, *_ranked(largest(scaled, 64), given))
    assert bool(done.all())
    by_sort, _ = _cutoffs(rows, *descending(scaled, given))
    drops = _dropped([row], scaled, given)
    masks = (scaled >= by_candidates[:, None], scaled >= by_sort[:, None], ~drops)
    return [torch.nonzero(mask[0, :vocab])[:, 0].tolist() for mask in masks]


def _ranked(found: tuple[torch.Tensor, torch.Tensor], weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values, ids = found
    return values, weights.gather(1, ids).double()


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.5, [0]), (0.5625, [0, 1]), (0.8125, [0, 1, 2]), (0.75, [0, 1]), (2**-20, [0])]
)
def test_nucleus_is_the_smallest_that_reaches_top_p(top_p: float, kept: list[int]) -> None:
    """Weights 8, 4, 3, 1 of 16: reaching the mass exactly is enough, falling short by one is not."""
    row = Row(torch.tensor([3.0, 2.0, 1.0, 0.0]), top_p=top_p)
    assert _both_ways(row, [8, 4, 3, 1]) == [kept] * 3
    # Just above an exact multiple the next token is needed.
    above = replace(row, top_p=float(np.nextafter(np.float32(0.75), np.float32(1))))
    assert _both_ways(above, [8, 4, 3, 1]) == [[0, 1, 2]] * 3


def test_neighbouring_floats_are_told_apart_and_zeros_are_not() -> None:
    below = float(np.nextafter(np.float32(1.0), np.float32(0.0)))
    assert _both_ways(Row(torch.tensor([below, 1.0, -5.0]), top_k=1), [1, 1, 1]) == [[1]] * 3
    below = float(np.nextafter(np.float32(-1.0), np.float32(-2.0)))
    assert _both_ways(Row(torch.tensor([below, -1.0, -5.0]), top_k=1), [1, 1, 1]) == [[1]] * 3
    assert _both_ways(Row(torch.tensor([0.0, -0.0, -5.0]), top_k=1), [1, 1, 1]) == [[0, 1]] * 3


def test_top_p_counts_all_ties_that_top_k_kept() -> None:
    """Top-k 50 ends among 500 equal logits: 540 tokens stay, and the nucleus is a share of all of those."""
    logits = torch.full((3000,), -9.0)
    logits[:40] = torch.linspace(1.5, 1.0, 40)
    logits[1000:1500] = 0.0
    row = Row(logits, top_k=50, top_p=0.16)
    p = logits.double().exp()
    p[logits < 0] = 0.0
    ordered = (p / p.sum())[:40].cumsum(-1)
    last = int((ordered < 0.16).sum())
    assert 10 < last < 39
    assert token_of(row, 1 - 2**-53) == last


def test_more_ties_than_candidates() -> None:
    """A flat row: every token ties with the k-th, so all are kept, through every level of candidates."""
    row = Row(torch.zeros(20_000), top_k=50, top_p=0.5)
    assert [token_of(row, u) for u in (0.0, 0.25, 0.5)] == [0, 5000, 10_000]
    assert token_of(row, 1 - 2**-53) == 19_999


def test_top_p_counts_what_top_k_left() -> None:
    """Of 0.4, 0.3, 0.2, 0.1, top-k 2 leaves 4/7 and 3/7: 0.55 of that is the first alone, 0.55 of the whole is both."""
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert token_of(Row(logits, top_k=2, top_p=0.55), 0.999) == 0
    assert token_of(Row(logits, top_p=0.55), 0.999) == 1


@pytest.mark.parametrize(("penalty", "prompt", "output"), [(1.3, (4, 9, 9), (2,)), (0.7, (1,), (1, 1, 5))])
def test_repetition_penalty_is_that_of_transformers(
    penalty: float, prompt: tuple[int, ...], output: tuple[int, ...]
) -> None:
    logits = torch.randn(40, generator=torch.Generator().manual_seed(1)) * 2
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + output]), logits[None].clone())[0]
    probes = _probes(expected.double().softmax(-1))
    rows = [Row(logits, uniform=u, repetition=penalty, prompt=prompt, output=output) for _, u in probes]
    assert sample(rows).tokens.tolist() == [token for token, _ in probes]
