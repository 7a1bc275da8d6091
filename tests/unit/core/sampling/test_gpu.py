"""The sampler on a CUDA device: no host sync, kept sets as on the CPU, rows independent of their batch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from core.sampling.penalties import TokenHistory
from core.sampling.places import Places
from core.sampling.registry import build_sampler
from core.sampling.sampler import SampleOutput, Sampler
from tests.unit.core.sampling.batches import CPU, Row, batch_of, history_of, places_of
from tests.unit.core.sampling.test_sampler import random_row

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def sync_mode_restored() -> Iterator[None]:
    """Whatever a test does with the sync debug mode ends with it."""
    yield
    torch.cuda.set_sync_debug_mode("default")


def _on_device(rows: list[Row]) -> tuple[torch.Tensor, Places, TokenHistory]:
    logits, places = torch.stack([row.logits for row in rows]).cuda(), places_of(rows)
    where = Places(places.lens.cuda(), places.uniforms.cuda())
    return logits, where, TokenHistory(history_of(rows).buffer.cuda())


def _sample(rows: list[Row]) -> SampleOutput:
    logits, places, history = _on_device(rows)
    batch = batch_of(rows, logprobs=True, top_logprobs=4)
    found = build_sampler(logits.shape[1], logits.device).sample(logits, batch, places, history)
    fields = (found.tokens, found.non_finite, found.logprobs, found.top_ids, found.top_values)
    return SampleOutput(*(None if field is None else field.cpu() for field in fields))  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_nothing_waits_for_the_device(seed: int, sync_mode_restored: None) -> None:
    rng = np.random.default_rng(seed)
    rows = [random_row(rng, 1003) for _ in range(32)]
    logits, places, history = _on_device(rows)
    batch = batch_of(rows, logprobs=True, top_logprobs=4)
    at = torch.arange(1, 33, device=logits.device)
    sampler = build_sampler(1003, logits.device)
    sampler.sample(logits.clone(), batch, places, history)
    torch.cuda.set_sync_debug_mode("error")
    found = sampler.sample(logits, batch, places, history)
    history.seed([1, 2], [np.arange(3), np.arange(4)])
    history.append(at, at, found.tokens)


@pytest.mark.parametrize("vocab", [1003, 32_000])
def test_a_row_does_not_see_its_batch(vocab: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = [random_row(rng, vocab) for _ in range(24)]
    whole = _sample(rows)
    order = rng.permutation(24).tolist()
    assert whole.tokens[order].tolist() == _sample([rows[i] for i in order]).tokens.tolist()
    for place in range(24):
        assert _sample([rows[place]]).tokens.tolist() == [int(whole.tokens[place])]


def test_tokens_as_on_the_cpu(seed: int) -> None:
    """Exponentials differ in the last bit between devices, so one draw in many may fall to a neighbour."""
    rng = np.random.default_rng(seed)
    rows = [random_row(rng, 5000) for _ in range(200)]
    logits = torch.stack([row.logits for row in rows])
    expected = Sampler(5000, CPU).sample(logits, batch_of(rows), places_of(rows), history_of(rows)).tokens
    assert (_sample(rows).tokens == expected).float().mean() > 0.98
