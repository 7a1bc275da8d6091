"""The Triton sampler against the plain one, equal in every bit: interpreted, or on a CUDA device.

Both weigh tokens by the same exponential here. The CPU's own is PyTorch's softmax, which may differ in a last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from core.batch.grammar_batch import TokenMask
from core.batch.sampling_batch import SamplingBatch
from core.device.recorder import Recorder
from core.sampling import draw
from core.sampling import sampler as plain
from core.sampling.penalties import TokenHistory, apply_bias, apply_penalties
from core.sampling.places import Places
from core.sampling.sampler import SampleOutput, Sampler, Scored
from core.sampling.splitting import sample_in_pieces
from tests.support.fakes.tight_allocator import TightAllocator
from tests.support.interpreted import quick_calls
from tests.unit.core.attention.test_conformance import DEVICE, INTERPRETED
from tests.unit.core.attention.test_triton import interpreted
from tests.unit.core.relay.test_compiled import Heard
from tests.unit.core.sampling.batches import CPU, Row, batch_of, history_of, places_of
from tests.unit.core.sampling.test_kept_sets import _random_rows

pytestmark = interpreted

LAST = 1 - 2**-53
"""The largest uniform."""


@pytest.fixture(autouse=True)
def interpreted_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        quick_calls(monkeypatch)
    monkeypatch.setattr(plain, "weigh", draw.weigh_by_exp)


def triton_sampler(vocab: int) -> Sampler:
    from core.sampling.triton.sampler import TritonSampler

    return TritonSampler(vocab, torch.device(DEVICE))


def given(rows: list[Row]) -> tuple[torch.Tensor, Places, TokenHistory]:
    """Logits, places and history of `rows` where the kernels run."""
    places = places_of(rows)
    logits = torch.stack([row.logits for row in rows]).to(DEVICE)
    history = TokenHistory(history_of(rows).buffer.to(DEVICE))
    return logits, Places(places.lens.to(DEVICE), places.uniforms.to(DEVICE)), history


def sampled(rows: list[Row], mask: TokenMask | None = None, **options: Any) -> SampleOutput:
    logits, places, history = given(rows)
    return triton_sampler(logits.shape[1]).sample(logits, batch_of(rows, **options), places, history, mask)


def expected(rows: list[Row], mask: TokenMask | None = None, *, accelerator: bool, **options: Any) -> SampleOutput:
    """What the plain sampler says, on this machine's memory: by candidates, or by the accelerators' bisection."""
    logits = torch.stack([row.logits for row in rows])
    sampler = Sampler(logits.shape[1], CPU)
    if accelerator:
        sampler.device = SimpleNamespace(type="cuda")  # type: ignore[assignment]
    return sampler.sample(logits, batch_of(rows, **options), places_of(rows), history_of(rows), mask)


def check(rows: list[Row], mask: TokenMask | None = None) -> None:
    found = sampled(rows, mask)
    for accelerator in (False, True):
        wanted = expected(rows, mask, accelerator=accelerator)
        assert found.non_finite.tolist() == wanted.non_finite.tolist()
        assert found.tokens.tolist() == wanted.tokens.tolist(), accelerator


def with_histories(rows: list[Row], rng: np.random.Generator) -> list[Row]:
    """The rows with greedy ones, biases and penalties among them, and with tokens that come again and again."""
    vocab = len(rows[0].logits)
    made = []
    for place, row in enumerate(rows):
        some: dict[str, Any] = {} if place % 3 else {"temperature": 0.0}
        if place % 2:
            some |= {"repetition": 1.3, "frequency": 0.4, "presence": 0.3 * (place % 3)}
            prompt, output = (tuple(rng.integers(0, min(vocab, 40), n).tolist()) for n in (90, 500))
            some |= {"prompt": prompt, "output": output}
        if place % 4 > 1:
            some |= {"bias": ((7, 4.0), (9, -torch.inf), (7, 0.3), (7, -1.7))}
        made.append(replace(row, **some))
    return made


def mask_of(places: list[int], vocab: int, rng: np.random.Generator) -> TokenMask:
    words = rng.integers(-(2**31), 2**31, (len(places), vocab // 32 + 2 - vocab // 32 % 2)).astype(np.int32)
    return TokenMask(np.array(places), words)


@pytest.mark.parametrize("vocab", [777, 2600])
def test_interpreted_tokens_are_those_of_the_plain_sampler(vocab: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    check(_random_rows(rng, vocab, 10 if vocab == 777 else 5))


def test_interpreted_options_of_all_kinds_in_one_batch(seed: int) -> None:
    rng = np.random.default_rng(seed)
    check(with_histories(_random_rows(rng, 1003, 8), rng), mask_of([1, 2, 6], 1003, rng))


def edges(vocab: int = 300) -> list[Row]:
    """Rows at the edges of what logits and options may be."""
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(3)) * 3
    zeros = torch.zeros(vocab)
    zeros[::2] = -0.0
    signed = torch.full((vocab,), -5.0)
    signed[[10, 20, 30]] = torch.tensor([1.0, 0.0, -0.0])
    tiny = torch.linspace(-1, 1, vocab) * 1e-40
    few = torch.full((vocab,), -torch.inf)
    few[[3, 200]] = torch.tensor([1.0, 0.5])
    low = logits.clone()
    low[50:250] = torch.finfo(torch.float32).min
    broken = [logits.clone() for _ in range(3)]
    broken[0][7], broken[1][299], broken[2][:] = torch.nan, torch.inf, -torch.inf
    rows = [Row(row, temperature=t) for row in broken for t in (0.0, 0.7)]
    rows += [Row(zeros, top_k=1, uniform=u) for u in (0.0, LAST)]
    rows += [Row(signed, top_k=2, uniform=LAST)]
    rows += [Row(tiny, top_k=9, top_p=0.5), Row(tiny, temperature=1e-38, top_p=0.5), Row(tiny, temperature=0.0)]
    rows += [
        Row(few, top_k=k, uniform=u) for k, u in ((1, 0.99), (2, 0.99), (3, 0.99), (vocab - 1, 0.0), (vocab, 0.99))
    ]
    rows += [Row(low, top_k=k, top_p=0.99, uniform=0.999) for k in (60, 180)]
    rows += [Row(logits, temperature=1e-30), Row(logits, temperature=50.0, top_p=0.999999, uniform=LAST)]
    rows += [Row(logits, top_k=1, uniform=LAST), Row(logits, top_p=1e-7, uniform=LAST)]
    rows += [Row(logits, min_p=1.0, uniform=LAST), Row(logits, top_p=1.0, uniform=0.0), Row(logits, uniform=LAST)]
    rows += [Row(logits.bfloat16().float().round(), top_k=20, top_p=p, uniform=0.9) for p in (0.3, 0.9)]
    return rows


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
def test_interpreted_edges() -> None:
    """Logits that are too large for one more product become infinite, on a GPU without a word."""
    check(edges())


@pytest.mark.parametrize("vocab", [2, 33])
def test_interpreted_vocabularies_of_less_than_a_block(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    check(_random_rows(rng, vocab, 3))


def test_interpreted_changes_are_those_of_the_plain_way(seed: int) -> None:
    """In every bit of every logit, for histories longer than what is handled at a time."""
    rng = np.random.default_rng(seed)
    rows = [replace(row, temperature=0.0) for row in with_histories(_random_rows(rng, 500, 8), rng)]
    batch = batch_of(rows)
    logits, places, history = given(rows)
    triton_sampler(500).sample(logits, batch, places, history)
    wanted = torch.stack([row.logits for row in rows])
    apply_bias(wanted, batch, places_of(rows).lens)
    apply_penalties(wanted, batch, places_of(rows).lens, history_of(rows))
    assert torch.equal(logits.cpu(), wanted)


def test_interpreted_biases_count_in_their_range_and_sum_in_order() -> None:
    """Three on one token, whose sum depends on its order, of which one does not count at this length."""
    row = Row(torch.zeros(40), temperature=0.0, bias=((5, 1e8), (5, 3.0), (5, -1e8), (6, 1.0)), output=(1, 2))
    batch = batch_of([row, row])
    batch.bias_until[1], batch.bias_from[6] = 3, 4
    logits, places, history = given([row, row])
    triton_sampler(40).sample(logits, batch, places, history)
    wanted = torch.zeros(2, 40)
    apply_bias(wanted, batch, places_of([row, row]).lens)
    assert torch.equal(logits.cpu(), wanted) and wanted[0, 5] == 0.0 and wanted[1, 5] == 1e8


def test_interpreted_more_biases_than_are_handled_at_a_time() -> None:
    rng = np.random.default_rng(6)
    bias = tuple(zip(rng.integers(0, 300, 530).tolist(), rng.normal(0, 3, 530).tolist(), strict=True))
    row = Row(torch.randn(300, generator=torch.Generator().manual_seed(5)), temperature=0.0, bias=bias)
    logits, places, history = given([row])
    triton_sampler(300).sample(logits, batch_of([row]), places, history)
    wanted = row.logits[None].clone()
    apply_bias(wanted, batch_of([row]), places_of([row]).lens)
    assert torch.equal(logits.cpu(), wanted)


def test_interpreted_log_probabilities_are_of_the_raw_logits() -> None:
    """What was changed is drawn: its log probability is of before, through a bias, a penalty, and both."""
    logits = torch.randn(6, 1003, generator=torch.Generator().manual_seed(1)) * 3
    ways: tuple[dict[str, Any], ...] = (
        {"temperature": 0.9, "top_k": 30},
        {"bias": ((3, 90.0), (3, 1.0)), "output": (3, 3), "frequency": 0.5},
        {"bias": ((8, 90.0),)},
        {"output": (4,), "presence": -90.0},
        {},
        {"repetition": 1.2, "output": (5, 5)},
    )
    rows = [Row(row, **{"temperature": 0.0} | way) for row, way in zip(logits, ways, strict=True)]
    chosen, wants = np.arange(18).reshape(6, 3) * 50, np.array([5, 0, 2, 3, -1, 4])
    batch = replace(batch_of(rows, logprobs=True, top_logprobs=5, chosen=chosen), alternatives=wants)
    given_logits, places, history = given(rows)
    found = triton_sampler(1003).sample(given_logits, batch, places, history)
    assert found.logprobs is not None and found.top_ids is not None and found.top_values is not None
    assert found.tokens[[1, 2, 3]].tolist() == [3, 8, 4]
    model = logits.double().log_softmax(-1)
    assert found.top_ids[0].tolist() == np.lexsort((np.arange(1003), -logits.numpy()[0]))[:5].tolist()
    told = model.gather(1, torch.from_numpy(chosen))[wants >= 0]
    torch.testing.assert_close(found.chosen[wants >= 0].double().cpu(), told, rtol=0, atol=1e-5)  # type: ignore[index]
    for place, count in enumerate(wants.tolist()):
        if count >= 0:
            wanted = model[place, int(found.tokens[place])]
            torch.testing.assert_close(found.logprobs[place].double().cpu(), wanted, rtol=0, atol=1e-5)
        best = model[place].sort(descending=True).values[: max(count, 0)]
        torch.testing.assert_close(found.top_values[place, : max(count, 0)].double().cpu(), best, rtol=0, atol=1e-5)
        assert not found.top_values[place, max(count, 0) :].any()


def test_interpreted_ties_are_listed_by_rising_id() -> None:
    logits = torch.zeros(2, 300)
    logits[0, [9, 4, 250]], logits[1, 100] = 1.0, torch.nan
    found = sampled([Row(row, temperature=0.0) for row in logits], logprobs=True, top_logprobs=5)
    assert found.top_ids is not None
    assert found.tokens.tolist() == [4, 0] and found.non_finite.tolist() == [False, True]
    assert found.top_ids[0].tolist() == [4, 9, 250, 0, 1]
    assert found.top_ids.min() >= 0 and found.top_ids.max() < 300


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_interpreted_leftovers_count_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """In memory that is handed out, and behind the end of a history. What a row has noted there is its own.

    On a GPU rows change their logits at once; interpreted they take turns, so it is what they leave that tells.
    """
    from core.sampling.triton import sampler

    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(4)) * 3
    rows = [
        Row(logits[0], temperature=0.0, frequency=0.1, output=(3, 3, 8, 3, 1, 9, 3)),
        Row(logits[1], temperature=0.0, presence=0.1, output=(3, 3)),
        Row(logits[2], temperature=0.0, repetition=1e-38, output=(3, 8)),
    ]
    given_logits, places, history = given(rows)
    best = int(logits[1].argmax())
    history.buffer[2, 3:] = best
    seen: list[torch.Tensor] = []
    launch = sampler.sample_rows

    def watched(*arguments: Any, **named: Any) -> None:
        scratch = next(each for each in arguments if each is not None and each.dim() == 3)
        scratch.view(torch.float32).fill_(50.0)
        seen.append(scratch)
        launch(*arguments, **named)

    monkeypatch.setattr(sampler, "sample_rows", watched)
    found = triton_sampler(40).sample(given_logits, batch_of(rows, logprobs=True), places, history)
    wanted = logits.clone()
    apply_penalties(wanted, batch_of(rows), places_of(rows).lens, history_of(rows))
    assert torch.equal(given_logits.cpu(), wanted)
    assert found.tokens[1] == best and found.logprobs is not None
    expected = logits.log_softmax(-1).gather(1, found.tokens.cpu()[:, None])[:, 0]
    torch.testing.assert_close(found.logprobs.cpu(), expected, rtol=0, atol=1e-5)
    for place, row in enumerate(rows):
        tokens = [*row.prompt, *row.output]
        assert seen[0][place, 0, : len(tokens)].view(torch.float32).tolist() == row.logits[tokens].tolist()


def test_interpreted_biases_of_places_that_take_turns() -> None:
    """As where drafts are verified: a bias of a row, for each of its places, before the next."""
    rows = [
        Row(torch.zeros(40), temperature=0.0, bias=((5, 1.0), (6, 2.5), (5, 8.0))),
        Row(torch.zeros(40), temperature=0.0, bias=((7, 3.0),)),
    ]
    batch = batch_of(rows).spread(np.array([3, 2]))
    assert (np.diff(batch.bias_rows) < 0).any()
    lens = torch.ones(5, dtype=torch.int64)
    logits, wanted = torch.zeros(5, 40).to(DEVICE), torch.zeros(5, 40)
    triton_sampler(40).sample(logits, batch, Places(lens.to(DEVICE), lens.double().to(DEVICE)))
    apply_bias(wanted, batch, lens)
    assert torch.equal(logits.cpu(), wanted) and wanted[:, 5].tolist() == [9.0, 9.0, 9.0, 0.0, 0.0]


def test_interpreted_no_more_alternatives_than_tokens() -> None:
    rows = [Row(torch.tensor([1.0, 3.0, 2.0]), temperature=0.0)]
    found = sampled(rows, logprobs=True, top_logprobs=5)
    assert found.top_ids is not None and found.top_values is not None
    assert found.top_ids.tolist() == [[1, 2, 0]] and found.top_values.shape == (1, 3)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
def test_interpreted_quotients_that_are_infinite_are_greedy() -> None:
    """The logit is finite, over its temperature it is not: nothing could be told from the others near it."""
    logits = torch.randn(300, generator=torch.Generator().manual_seed(7)) * 1e35
    found = sampled([Row(logits, temperature=1e-6, uniform=LAST), Row(logits, temperature=1e-6, top_p=0.5)])
    assert found.tokens.tolist() == [int(logits.argmax())] * 2 and not found.non_finite.any()


def test_interpreted_a_mask_hides_no_nan() -> None:
    logits = torch.zeros(1, 64)
    logits[0, 40] = torch.nan
    mask = TokenMask(np.array([0]), np.array([[7, 0]], np.int32))
    found = sampled([Row(logits[0], temperature=0.0)], mask)
    assert found.non_finite.tolist() == [True] and found.tokens.tolist() == [0]


def test_interpreted_a_recorder_hears_whose_history_is_read() -> None:
    """Of the rows with a penalty, and of no others."""
    rows = [Row(torch.zeros(40), temperature=0.0), Row(torch.zeros(40), temperature=0.0, presence=0.5, output=(3,))]
    told = []
    for sampler in (triton_sampler(40), Sampler(40, torch.device(DEVICE))):
        logits, places, history = given(rows)
        heard = Heard()
        history.recorder = cast(Recorder, heard)
        sampler.sample(logits, batch_of(rows), places, history)
        told.append(heard.told)
    assert told[0] == told[1] == [("read", "token_history", [2])]


def short_of_memory(refuses: Callable[[int], bool]) -> tuple[SampleOutput, list[int], int]:
    """What greedy rows with every change give where allocations fail that `refuses` names; the rows given up; how many
    allocations there were.
    """
    rng = np.random.default_rng(8)
    rows = [replace(row, temperature=0.0) for row in with_histories(_random_rows(rng, 512, 4), rng)]
    batch: SamplingBatch = batch_of(rows, logprobs=True, top_logprobs=2, chosen=np.array([[0, 5]] * 4))
    logits, places, history = given(rows)
    sizes: list[int] = []

    def asked(size: int) -> bool:
        sizes.append(size)
        return refuses(len(sizes) - 1)

    with TightAllocator(asked):
        pieces = sample_in_pieces(triton_sampler(512), Scored(logits, places), batch, history, mask_of([1], 512, rng))
    return pieces.output, pieces.given_up.tolist(), len(sizes)


def test_interpreted_changes_happen_once_where_memory_is_short() -> None:
    """At each allocation of the sampler in turn; the first six are of the output itself."""
    wanted, given_up, count = short_of_memory(lambda _: False)
    assert not given_up and count > 8
    for at in range(6, count - 1, 2):
        found, given_up, _ = short_of_memory(lambda place, at=at: place == at)
        assert not given_up
        for name in ("tokens", "non_finite", "logprobs", "top_ids", "top_values", "chosen"):
            assert torch.equal(getattr(found, name), getattr(wanted, name)), (at, name)
