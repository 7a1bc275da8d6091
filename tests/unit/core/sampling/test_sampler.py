"""What a row samples, and that it samples the same whatever else is in the batch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from core.sampling.draw import draw, draw_among
from core.sampling.sampler import SampleOutput, Sampler
from core.sampling.uniform import origin, uniforms
from tests.unit.core.sampling.batches import CPU, Row, batch_of, history_of, places_of, sample, token_of


@pytest.fixture
def two_threads() -> Iterator[None]:
    """PyTorch splits one long row over threads, and several rows by row: the case where sums differ."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def random_row(rng: np.random.Generator, vocab: int) -> Row:
    """A row with any mix of options, and often with none."""
    logits = torch.from_numpy(rng.normal(0, rng.choice([0.01, 1.0, 4.0]), vocab)).float()
    if rng.random() < 0.3:
        logits = logits.bfloat16().float()
    prompt = tuple(rng.integers(0, vocab, rng.integers(1, 30)).tolist())
    output = tuple(rng.integers(0, vocab, rng.integers(0, 30)).tolist())
    biased = rng.integers(0, vocab, rng.choice([0, 0, 3])).tolist()
    return Row(
        logits,
        temperature=float(rng.choice([0.0, 0.3, 1.0, 1.7])),
        top_k=int(rng.choice([0, 0, 1, 40, 64, 3000])),
        top_p=float(rng.choice([1.0, 1.0, 0.95, 0.5])),
        min_p=float(rng.choice([0.0, 0.0, 0.1])),
        uniform=float(rng.random()),
        repetition=float(rng.choice([1.0, 1.0, 1.2])),
        frequency=float(rng.choice([0.0, 0.0, 0.5])),
        presence=float(rng.choice([0.0, 0.0, -0.7])),
        prompt=prompt,
        output=output,
        bias=tuple((token, float(rng.choice([-np.inf, 3.0, -2.0]))) for token in biased),
    )


def assert_equal_rows(whole: SampleOutput, part: SampleOutput, places: list[int]) -> None:
    """Bit for bit, the alternatives as far as both list them."""
    assert part.tokens.tolist() == whole.tokens[places].tolist()
    assert part.non_finite.tolist() == whole.non_finite[places].tolist()
    assert part.logprobs is not None and whole.logprobs is not None
    assert torch.equal(part.logprobs, whole.logprobs[places])
    assert part.top_ids is not None and whole.top_ids is not None
    assert torch.equal(part.top_ids, whole.top_ids[places, : part.top_ids.shape[1]])


@pytest.mark.parametrize(("vocab", "count"), [(37, 24), (1003, 24), (50_257, 6)])
def test_a_row_does_not_see_its_batch(vocab: int, count: int, seed: int, two_threads: None) -> None:
    """Alone, permuted, and in any partition: the same bits."""
    rng = np.random.default_rng(seed)
    rows = [random_row(rng, vocab) for _ in range(count)]
    whole = sample(rows, logprobs=True, top_logprobs=7)
    for place in range(count):
        assert_equal_rows(whole, sample([rows[place]], logprobs=True, top_logprobs=3), [place])
    order = rng.permutation(count).tolist()
    assert_equal_rows(whole, sample([rows[i] for i in order], logprobs=True, top_logprobs=7), order)
    cuts = [0, *sorted(rng.choice(np.arange(1, count), 3, replace=False).tolist()), count]
    for start, stop in itertools.pairwise(cuts):
        part = sample([rows[i] for i in order[start:stop]], logprobs=True, top_logprobs=5)
        assert_equal_rows(whole, part, order[start:stop])


@pytest.mark.parametrize(
    "options",
    [{}, {"top_k": 12}, {"top_p": 0.8}, {"min_p": 0.1}, {"temperature": 0.6}, {"top_k": 30, "top_p": 0.9}],
    ids=str,
)
def test_frequencies_follow_the_distribution(options: dict[str, float]) -> None:
    """20,000 positions of one seed: observed counts against the exact shares, by chi-square."""
    draws = 20_000
    logits = torch.randn(60, generator=torch.Generator().manual_seed(3)) * 1.5
    row = Row(logits, **options)  # type: ignore[arg-type]
    found = uniforms(np.full(draws, origin(99, 0)), np.arange(draws))
    rows = [replace(row, uniform=float(u)) for u in found]
    counts = torch.bincount(sample(rows).tokens, minlength=60).double()
    shares = _shares(row)
    assert not counts[shares == 0].any()
    likely = shares * draws >= 5
    expected = shares[likely] * draws
    chi_square = float(((counts[likely] - expected) ** 2 / expected).sum())
    freedom = int(likely.sum()) - 1
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5


def _shares(row: Row) -> torch.Tensor:
    """Probabilities by the definition, in float64, with a sort."""
    p = (row.logits.double() / row.temperature).softmax(-1)
    if row.top_k:
        p = torch.where(p >= p.sort(descending=True).values[row.top_k - 1], p, 0.0)
        p = p / p.sum()
    ordered, ids = p.sort(descending=True)
    p[ids[ordered.cumsum(-1) - ordered >= row.top_p]] = 0.0
    p[p < row.min_p * p.max()] = 0.0
    return p / p.sum()


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = torch.zeros(3000)
    logits[[700, 1500, 2999]] = 2.0
    assert token_of(Row(logits, temperature=0.0)) == 700


def test_greedy_is_after_bias_and_penalties() -> None:
    logits = torch.tensor([5.0, 4.0, 3.0, -1.0])
    assert token_of(Row(logits, temperature=0.0)) == 0
    assert token_of(Row(logits, temperature=0.0, bias=((0, -2.0),))) == 1
    assert token_of(Row(logits, temperature=0.0, bias=((3, 10.0),))) == 3
    assert token_of(Row(logits, temperature=0.0, repetition=2.0, prompt=(0,))) == 1
    assert token_of(Row(logits, temperature=0.0, frequency=0.6, prompt=(0, 0), output=(0, 0))) == 1


def test_forbidden_tokens_are_never_drawn() -> None:
    """min_tokens puts -inf on the stop tokens; a client's bias on the same token must not lift it."""
    logits = torch.tensor([0.0, 9.0, 0.0, 0.0])
    for bias in (((1, 50.0), (1, -np.inf)), ((1, -np.inf), (1, 50.0))):
        row = Row(logits, bias=bias)
        assert {token_of(row, u) for u in np.linspace(0, 1 - 2**-53, 31)} == {0, 2, 3}
        assert token_of(replace(row, temperature=0.0)) == 0


def test_tiny_temperature_is_greedy() -> None:
    logits = torch.randn(5000, generator=torch.Generator().manual_seed(0)) * 50
    for temperature in (1e-45, 1e-20, 1e-6):
        assert token_of(Row(logits, temperature=temperature, top_p=0.9), 0.77) == int(logits.argmax())


def test_largest_uniform_returns_the_last_kept_token() -> None:
    logits = torch.zeros(1001)
    logits[900:] = -40.0
    for filters in ({}, {"min_p": 0.5}, {"top_k": 900}, {"top_p": 0.5}):
        assert token_of(Row(logits, **filters), 1 - 2**-53) == 899  # type: ignore[arg-type]
        assert token_of(Row(logits, **filters), 0.0) == 0  # type: ignore[arg-type]


def test_uniform_beyond_its_range_still_gives_a_kept_token() -> None:
    """`draw` must not run off the end of the CDF, even if a uniform of 1 ever came by."""
    weights = torch.zeros(1, 256)
    weights[0, [7, 200]] = 3.0
    assert draw(weights, torch.tensor([1.0], dtype=torch.float64)).tolist() == [200]
    assert draw_among(torch.tensor([[200, 7]]), torch.tensor([[3.0, 3.0]]).double(), torch.ones(1)).tolist() == [200]


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("options", [{"temperature": 0.0}, {}, {"top_k": 3, "top_p": 0.9}, {"min_p": 0.2}], ids=str)
def test_one_bad_row_is_flagged_and_the_rest_untouched(poison: float, options: dict[str, float]) -> None:
    generator = torch.Generator().manual_seed(8)
    rows = [Row(torch.randn(3000, generator=generator), uniform=0.1 * i, **options) for i in range(6)]  # type: ignore[arg-type]
    expected = sample(rows, logprobs=True)
    bad = rows[2].logits.clone()
    bad[1234] = poison
    rows[2] = replace(rows[2], logits=bad)
    rows[4] = replace(rows[4], logits=torch.full((3000,), -torch.inf))
    found = sample(rows, logprobs=True)
    assert found.non_finite.tolist() == [False, False, True, False, True, False]
    assert found.tokens[[2, 4]].tolist() == [0, 0]
    good = [0, 1, 3, 5]
    assert torch.equal(found.tokens[good], expected.tokens[good])
    assert found.logprobs is not None and expected.logprobs is not None
    assert torch.equal(found.logprobs[good], expected.logprobs[good])


def test_mostly_forbidden_rows_are_finite() -> None:
    """A grammar mask leaves a handful of tokens: far fewer than top-k asks for."""
    logits = torch.full((5000,), -torch.inf)
    logits[[10, 4000]] = torch.tensor([1.0, 1.0])
    for filters in ({}, {"top_k": 50}, {"top_p": 0.99}, {"top_k": 50, "top_p": 0.99, "min_p": 0.01}):
        row = Row(logits, **filters)  # type: ignore[arg-type]
        assert [token_of(row, u) for u in (0.0, 0.2, 0.8)] == [10, 10, 4000]


def test_empty_batch() -> None:
    """A step of middle chunks samples nothing."""
    found = Sampler(100, CPU).sample(torch.empty(0, 100), batch_of([], logprobs=True, top_logprobs=2), places_of([]))
    assert found.tokens.shape == (0,) and found.non_finite.shape == (0,)
    assert found.top_ids is not None and found.top_ids.shape == (0, 2)


def test_wrong_logits_are_refused() -> None:
    row = Row(torch.zeros(10))
    with pytest.raises(AssertionError):
        Sampler(10, CPU).sample(torch.zeros(1, 11), batch_of([row]), places_of([row]))
    with pytest.raises(AssertionError):
        Sampler(10, CPU).sample(torch.zeros(1, 10, dtype=torch.bfloat16), batch_of([row]), places_of([row]))
    with pytest.raises(AssertionError, match="history"):
        Sampler(10, CPU).sample(torch.zeros(1, 10), batch_of([replace(row, presence=1.0)]), places_of([row]))


def test_filters_switched_off_in_a_batch_with_filters() -> None:
    """Flags say that some row filters; a row that does not must still reach its whole vocabulary."""
    logits = torch.zeros(4000)
    rows = [Row(logits, uniform=0.9999), Row(logits, uniform=0.9999, top_k=1), Row(logits, uniform=0.9999, top_k=4000)]
    rows[1] = replace(rows[1], logits=torch.arange(4000.0))
    assert sample(rows).tokens.tolist() == [3999, 3999, 3999]
    assert history_of(rows).max_len == 1
