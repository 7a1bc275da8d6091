"""Vectors are what transformers' last hidden states give when they are pooled by hand, on every path of the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from core.config import EngineConfig, ExecutorConfig, MemoryConfig, ModelConfig, SchedulerConfig
from core.engine.async_engine import AsyncEngine
from core.engine.build import build_engine
from core.errors import InvalidRequest, QueueTimeout, RequestFailed
from core.types.io import Delta, EmbedRequest, EmbedResult, GenerateRequest, Pooling
from core.types.sampling_params import SamplingParams
from tests.equivalence.oracle import OUTPUT_TOKENS, Example, decided_examples, make_prompts
from tests.fakes.checkpoints import make_checkpoint

KINDS = ("llama", "qwen3", "gemma3_text")
LONGEST = 150
EMBEDDED, STREAMED = 64, 16


@asynccontextmanager
async def engine(directory: Path, *, overlap: bool = True, rows: int = 24, pool: int = 4096) -> AsyncIterator[Any]:
    """A started engine in chunks of 32 and pages of 8; at its end nothing is held and no check has failed."""
    made: AsyncEngine = build_engine(
        EngineConfig(
            model=ModelConfig(str(directory), dtype="float32"),
            memory=MemoryConfig(page_size=8, max_running_requests=rows, max_total_tokens=pool),
            scheduler=SchedulerConfig(chunked_prefill_size=32),
            executor=ExecutorConfig(device="cpu", overlap=overlap, assert_mode="trap", cpu_threads=1),
        )
    )
    await made.start()
    try:
        yield made
        assert await made.drain(10) == 0
        assert all(pool.used == 0 for pool in made.stats.pools), made.stats.pools
        assert sum(made.stats.assert_failures.values()) == 0
    finally:
        await made.stop()


@torch.no_grad()
def pooled_by_hand(directory: Path, prompts: list[tuple[int, ...]]) -> list[dict[Pooling, np.ndarray]]:
    """float32[H] per pooling and prompt, not normalised."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    found = []
    for prompt in prompts:
        states = model.base_model(input_ids=torch.tensor([prompt]), use_cache=False).last_hidden_state[0]
        found.append(
            {Pooling.MEAN: states.mean(0).numpy(), Pooling.LAST: states[-1].numpy(), Pooling.CLS: states[0].numpy()}
        )
    return found


@pytest.fixture(scope="module", params=KINDS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Example]]:
    directory = make_checkpoint(request.param, tmp_path_factory.mktemp(request.param), seed=0)
    return directory, decided_examples(directory, STREAMED, LONGEST, seed=1)


async def tokens_of(made: AsyncEngine, prompt: tuple[int, ...]) -> tuple[int, ...]:
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    stream = await made.generate(GenerateRequest(token_ids=prompt, sampling=params, want_text=False))
    return tuple([token async for event in stream if isinstance(event, Delta) for token in event.token_ids])


@pytest.mark.parametrize("overlap", [True, False])
async def test_vectors_and_streams_equal_transformers(checkpoint: tuple[Path, list[Example]], overlap: bool) -> None:
    directory, examples = checkpoint
    prompts = make_prompts(EMBEDDED, LONGEST, seed=2)
    expected = pooled_by_hand(directory, prompts)
    poolings = [list(Pooling)[i % 3] for i in range(EMBEDDED)]
    async with engine(directory, overlap=overlap, pool=LONGEST + 42) as made:
        asks = [
            made.embed(EmbedRequest(token_ids=prompt, pooling=pooling, normalize=i % 2 == 0))
            for i, (prompt, pooling) in enumerate(zip(prompts, poolings, strict=True))
        ]
        streams = [tokens_of(made, example.prompt) for example in examples]
        answers: list[Any] = await asyncio.gather(*streams, *asks)
        preemptions = made.stats.preemptions
    assert preemptions > 0, "the pool was meant to be too small"
    assert answers[:STREAMED] == [example.output for example in examples]
    for i, (answer, pooling) in enumerate(zip(answers[STREAMED:], poolings, strict=True)):
        want = expected[i][pooling]
        want = want / np.linalg.norm(want) if i % 2 == 0 else want
        np.testing.assert_allclose(answer.values, want, rtol=1e-4, atol=1e-4 * np.abs(want).max(), err_msg=str(i))
        assert answer.prompt_tokens == len(prompts[i])
        assert pooling is Pooling.LAST or answer.cached_tokens == 0


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"), seed=0)


async def test_prefixes_are_skipped_only_where_the_vector_does_not_need_them(llama: Path) -> None:
    prompt = tuple(range(3, 103))
    (expected,) = pooled_by_hand(llama, [prompt])
    async with engine(llama) as made:
        await tokens_of(made, prompt)
        for pooling in Pooling:
            answer: EmbedResult = await made.embed(EmbedRequest(token_ids=prompt, pooling=pooling, normalize=False))
            scale = float(np.abs(expected[pooling]).max())
            np.testing.assert_allclose(answer.values, expected[pooling], rtol=1e-4, atol=1e-4 * scale)
            assert (answer.cached_tokens > 0) == (pooling is Pooling.LAST)


async def test_dimensions_are_cut_before_the_norm(llama: Path) -> None:
    async with engine(llama) as made:
        raw = await made.embed(EmbedRequest(text="the quick brown fox", normalize=False))
        cut = await made.embed(EmbedRequest(text="the quick brown fox", dimensions=7))
        head = np.asarray(raw.values[:7])
        np.testing.assert_allclose(cut.values, head / np.linalg.norm(head), rtol=1e-5)
        for dimensions in (-1, 0, 65):
            with pytest.raises(InvalidRequest) as refused:
                await made.embed(EmbedRequest(text="a", dimensions=dimensions))
            assert [violation.field for violation in refused.value.violations] == ["dimensions"]
        for bad, field in ((EmbedRequest(text=""), "text"), (EmbedRequest(token_ids=(5, 320)), "token_ids.ids[1]")):
            with pytest.raises(InvalidRequest) as refused:
                await made.embed(bad)
            assert [violation.field for violation in refused.value.violations] == [field]


async def test_a_queue_of_prefills_alone_never_wedges(llama: Path) -> None:
    async with engine(llama, rows=2) as made, asyncio.timeout(60):
        prompts = make_prompts(500, 40, seed=3)
        answers = await asyncio.gather(*(made.embed(EmbedRequest(token_ids=prompt)) for prompt in prompts))
        assert len({answer.request_id for answer in answers}) == 500
        assert (made.stats.finished["stop"], made.stats.generation_tokens) == (500, 0)


async def test_who_leaves_or_waits_too_long_leaks_nothing(llama: Path) -> None:
    async with engine(llama, rows=2) as made:
        asks = [
            asyncio.create_task(made.embed(EmbedRequest(request_id=f"r{i}", token_ids=tuple(range(3, 203)))))
            for i in range(40)
        ]
        late = asyncio.create_task(made.embed(EmbedRequest(token_ids=(5,), queue_timeout=1e-6)))
        while made.stats.running < 2:
            await asyncio.sleep(0)
        assert made.abort("r39")
        for ask in asks[:39:2]:
            ask.cancel()
        done = await asyncio.gather(*asks, late, return_exceptions=True)
        assert isinstance(done[39], RequestFailed) and isinstance(done[40], QueueTimeout)
        assert all(isinstance(each, EmbedResult) for each in done[1:39:2])
        assert all(isinstance(each, asyncio.CancelledError | EmbedResult) for each in done[0:39:2])
        assert made.live_requests == 0
