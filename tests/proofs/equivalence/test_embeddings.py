"""Vectors are what transformers' last hidden states give when they are pooled by hand, on every path of the engine."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from core.config import EngineConfig, ExecutorConfig, LoraConfig, MemoryConfig, ModelConfig, SchedulerConfig
from core.engine.async_engine import AsyncEngine
from core.engine.build import build_engine
from core.engine.embedding import as_generation
from core.errors import (
    AdapterNotFound,
    DuplicateRequest,
    InvalidRequest,
    Overloaded,
    QueueTimeout,
    RequestAborted,
    RequestFailed,
)
from core.executor.pooling import Pooler
from core.text.tokenizer import Tokenizer
from core.types.io import EMBEDDINGS, Delta, Embedding, EmbedRequest, EmbedResult, GenerateRequest, Pooling
from core.types.sampling_params import SamplingParams
from tests.proofs.equivalence.oracle import OUTPUT_TOKENS, Example, decided_examples, make_prompts
from tests.support.engines import started
from tests.support.fakes.emulated_engine import emulated_engine
from tests.unit.core.models.lora.peft_oracle import ADAPTERS, make_adapter

KINDS = ("llama", "qwen3", "gemma3_text", "deepseek_v3", "bamba")
LONGEST = 150
EMBEDDED, STREAMED = 64, 16


@asynccontextmanager
async def engine(
    directory: Path,
    *,
    overlap: bool = True,
    rows: int = 24,
    pool: int = 4096,
    model_fields: Mapping[str, Any] = MappingProxyType({}),
    **configs: Any,
) -> AsyncIterator[Any]:
    """A started engine in chunks of 32 and pages of 8; at its end nothing is held and no check has failed."""
    built = build_engine(
        EngineConfig(
            model=ModelConfig(str(directory), dtype="float32", **model_fields),
            memory=MemoryConfig(page_size=8, max_running_requests=rows, max_total_tokens=pool),
            scheduler=SchedulerConfig(chunked_prefill_size=32),
            executor=ExecutorConfig(device="cpu", overlap=overlap, assert_mode="trap", cpu_threads=1),
            **configs,
        )
    )
    async with started(built) as made:
        yield made
        assert await made.drain(10) == 0
        assert all(pool.used == 0 for pool in made.stats.pools), made.stats.pools
        assert sum(made.stats.assert_failures.values()) == 0


@torch.no_grad()
def pooled_by_hand(
    directory: Path, prompts: list[tuple[int, ...]], adapter: Path | None = None
) -> list[dict[Pooling, np.ndarray]]:
    """float32[H] per pooling and prompt, not normalised; with PEFT's `adapter` if there is one."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    if adapter is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from peft import PeftModel

            model = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload().eval()
    found = []
    for prompt in prompts:
        states = model.base_model(input_ids=torch.tensor([prompt]), use_cache=False).last_hidden_state[0]
        found.append(
            {Pooling.MEAN: states.mean(0).numpy(), Pooling.LAST: states[-1].numpy(), Pooling.CLS: states[0].numpy()}
        )
    return found


@pytest.fixture(scope="module", params=KINDS)
def checkpoint(request: pytest.FixtureRequest, checkpoint_of: Callable[[str], Path]) -> tuple[Path, list[Example]]:
    directory = checkpoint_of(request.param)
    return directory, decided_examples(directory, STREAMED, LONGEST, seed=1)


async def embed(made: AsyncEngine, *inputs: str | tuple[int, ...], **fields: Any) -> EmbedResult:
    """Every vector of one request."""
    async with aclosing(await made.embed(EmbedRequest(inputs, **fields))) as call:
        return await call.result()


async def embed_one(made: AsyncEngine, given: str | tuple[int, ...], **fields: Any) -> Embedding:
    (found,) = (await embed(made, given, **fields)).embeddings
    return found


async def tokens_of(made: AsyncEngine, prompt: tuple[int, ...]) -> tuple[int, ...]:
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    stream = await made.generate(GenerateRequest(token_ids=prompt, sampling=params, want_text=False))
    return tuple([token async for event in stream if isinstance(event, Delta) for token in event.token_ids])


@pytest.mark.parametrize("overlap", [True, False])
async def test_vectors_and_streams_equal_transformers(checkpoint: tuple[Path, list[Example]], overlap: bool) -> None:
    directory, examples = checkpoint
    prompts = make_prompts(EMBEDDED, LONGEST, seed=2)
    expected = pooled_by_hand(directory, prompts)
    poolings = [EMBEDDINGS[i % 3] for i in range(EMBEDDED)]
    async with engine(directory, overlap=overlap, pool=LONGEST + 42) as made:
        asks = [
            embed_one(made, prompt, pooling=pooling, normalize=i % 2 == 0)
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
def llama(checkpoint_of: Callable[[str], Path]) -> Path:
    return checkpoint_of("llama")


async def test_prefixes_are_skipped_only_where_the_vector_does_not_need_them(llama: Path) -> None:
    prompt = tuple(range(3, 103))
    (expected,) = pooled_by_hand(llama, [prompt])
    async with engine(llama) as made:
        await tokens_of(made, prompt)
        for pooling in EMBEDDINGS:
            answer = await embed_one(made, prompt, pooling=pooling, normalize=False)
            scale = float(np.abs(expected[pooling]).max())
            np.testing.assert_allclose(answer.values, expected[pooling], rtol=1e-4, atol=1e-4 * scale)
            assert (answer.cached_tokens > 0) == (pooling is Pooling.LAST)


async def test_dimensions_are_cut_before_the_norm(llama: Path) -> None:
    async with engine(llama) as made:
        raw = await embed_one(made, "the quick brown fox", normalize=False)
        cut = await embed_one(made, "the quick brown fox", dimensions=7)
        head = raw.values[:7]
        np.testing.assert_allclose(cut.values, head / np.linalg.norm(head), atol=1e-5)
        for dimensions in (-1, 0, 65):
            with pytest.raises(InvalidRequest) as refused:
                await embed(made, "a", dimensions=dimensions)
            assert named(refused.value) == ["dimensions"]


def named(refused: InvalidRequest) -> list[str]:
    return [violation.field for violation in refused.violations]


async def test_every_bad_input_is_named_by_its_place(llama: Path) -> None:
    async with engine(llama, pool=512) as made:
        for inputs, fields in (
            ((), ["inputs"]),
            (("",), ["inputs[0].text"]),
            (
                ("fine", (5, 320), "", (5, -1)),
                ["inputs[1].token_ids.ids[1]", "inputs[2].text", "inputs[3].token_ids.ids[1]"],
            ),
            (((5,) * 1024, (5,) * 1023), ["inputs[0].token_ids.ids", "inputs[1].token_ids.ids"]),
        ):
            with pytest.raises(InvalidRequest) as refused:
                await made.embed(EmbedRequest(inputs))
            assert named(refused.value) == fields
        with pytest.raises(AdapterNotFound):
            await made.embed(EmbedRequest(("a",), adapter="nobody"))
        longest = await embed_one(made, tuple(3 + i % 300 for i in range(512)))
        assert longest.prompt_tokens == 512


async def test_inputs_of_one_request_are_sequences_of_their_own(llama: Path) -> None:
    prompts = make_prompts(60, LONGEST, seed=5)
    expected = pooled_by_hand(llama, prompts)
    async with engine(llama, rows=4) as made:
        result = await embed(made, *prompts, request_id="many", normalize=False)
        assert result.request_id == "many" and len(result.embeddings) == len(prompts)
        for prompt, answer, want in zip(prompts, result.embeddings, expected, strict=True):
            vector = want[Pooling.LAST]
            np.testing.assert_allclose(answer.values, vector, rtol=1e-4, atol=1e-4 * np.abs(vector).max())
            assert (answer.values.dtype, answer.prompt_tokens) == (np.float32, len(prompt))
        with pytest.raises(Overloaded) as full:
            await made.embed(EmbedRequest(((5,),) * 2000))
        assert full.value.reason == "QUEUE_FULL" and made.live_requests == 0


async def test_an_adapter_makes_vectors_of_its_own(llama: Path, tmp_path: Path) -> None:
    """Mixed in a batch with the base, they equal PEFT; a prefix that the base has cached is not the adapter's."""
    path = make_adapter(llama, tmp_path / "adapter", 3, **ADAPTERS["all"])
    prompts = make_prompts(12, LONGEST, seed=6)
    plain, adapted = pooled_by_hand(llama, prompts), pooled_by_hand(llama, prompts, adapter=path)
    async with engine(llama, lora=LoraConfig(adapters=(("one", str(path)),))) as made:
        for pooling in EMBEDDINGS:
            results = await asyncio.gather(
                *(embed(made, *prompts, adapter=name, pooling=pooling, normalize=False) for name in ("", "one", ""))
            )
            for result, states in zip(results, (plain, adapted, plain), strict=True):
                for answer, want in zip(result.embeddings, states, strict=True):
                    vector = want[pooling]
                    np.testing.assert_allclose(answer.values, vector, rtol=1e-4, atol=1e-4 * np.abs(vector).max())
    apart = [np.abs(a[Pooling.LAST] - b[Pooling.LAST]).max() for a, b in zip(plain, adapted, strict=True)]
    assert min(apart) > 0.01, "the adapter hardly changes anything, so equality says little"


async def test_a_model_without_hidden_states_says_so(llama: Path) -> None:
    async with started(emulated_engine(Tokenizer.load(llama), step_seconds=0.0)) as made:
        assert made.model_info.embedding_dimension == 0
        with pytest.raises(InvalidRequest) as refused:
            await made.embed(EmbedRequest(("a",)))
        assert named(refused.value) == ["pooling"]


async def test_a_vector_too_long_for_float32_is_normalised_all_the_same(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pooler, "pool", scaled(Pooler.pool, 1e25))
    async with engine(llama, overlap=False) as made:
        answer = await embed_one(made, "the quick brown fox")
        np.testing.assert_allclose(np.linalg.norm(answer.values), 1.0, rtol=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
async def test_a_vector_that_is_not_finite_fails_its_own_request_only(
    llama: Path, monkeypatch: pytest.MonkeyPatch, bad: float
) -> None:
    async with engine(llama) as made:
        before = await tokens_of(made, (5, 6, 7))
        with monkeypatch.context() as patch:
            patch.setattr(Pooler, "pool", scaled(Pooler.pool, bad, first_only=True))
            call = await made.embed(EmbedRequest(((5, 6, 7),)))
            stream = asyncio.create_task(tokens_of(made, (5, 6, 7)))
            with pytest.raises(RequestFailed) as failed:
                await call.result()
            assert failed.value.message == "the model produced non-finite hidden states for this request"
            await call.aclose()
            call = await made.embed(EmbedRequest(tuple((5 + i,) for i in range(9))))
            with pytest.raises(RequestFailed):
                await call.result()
            await call.aclose()
        assert await stream == before == await tokens_of(made, (5, 6, 7))
        assert np.isfinite((await embed_one(made, (5, 6, 7))).values).all()
        assert made.stats.finished["request_failed"] == 2


def scaled(pool: Any, factor: float, *, first_only: bool = False) -> Any:
    """`Pooler.pool` whose vectors, or the first of each step, are multiplied by `factor`."""

    def changed(self: Pooler, hidden: torch.Tensor, *given: Any) -> torch.Tensor:
        vectors: torch.Tensor = pool(self, hidden, *given).clone()
        vectors[: 1 if first_only else None] *= factor
        return vectors

    return changed


async def test_a_queue_of_prefills_alone_never_wedges(llama: Path) -> None:
    async with engine(llama, rows=2) as made, asyncio.timeout(60):
        prompts = make_prompts(500, 40, seed=3)
        answers = await asyncio.gather(*(embed(made, prompt) for prompt in prompts), return_exceptions=True)
        assert [answer for answer in answers if isinstance(answer, BaseException)] == []
        assert len({answer.request_id for answer in answers}) == 500
        assert (made.stats.finished["stop"], made.stats.generation_tokens) == (500, 0)


async def test_who_leaves_or_waits_too_long_leaks_nothing(llama: Path) -> None:
    async with engine(llama, rows=2) as made:
        asks = [asyncio.create_task(embed(made, tuple(range(3, 203)), (5, 6), request_id=f"r{i}")) for i in range(40)]
        late = asyncio.create_task(embed(made, (5,), queue_timeout=1e-6))
        while made.stats.running < 2:
            await asyncio.sleep(0)
        for waiting in (EmbedRequest(((5,),), request_id="r39"), GenerateRequest(token_ids=(5,), request_id="r39")):
            with pytest.raises(DuplicateRequest):
                await (made.embed(waiting) if isinstance(waiting, EmbedRequest) else made.generate(waiting))
        assert made.abort("r39")
        for ask in asks[:39:2]:
            ask.cancel()
        done = await asyncio.gather(*asks, late, return_exceptions=True)
        assert isinstance(done[39], RequestAborted) and isinstance(done[40], QueueTimeout)
        assert all(isinstance(each, EmbedResult) for each in done[1:39:2])
        assert all(isinstance(each, asyncio.CancelledError | EmbedResult) for each in done[0:39:2])
        assert made.live_requests == 0


async def test_what_a_request_says_of_its_turn_reaches_its_sequences(llama: Path) -> None:
    said: dict[str, Any] = {"tenant": "a", "weight": 2.5, "priority": -3, "deadline": 9.0}
    request = EmbedRequest(((5,), (6,)), **said)
    async with engine(llama) as made:
        for req in await made._embeddings.sequences(request, "r", 0.0):
            assert {name: getattr(req, name) for name in said} == said
    queued = as_generation(request)
    assert (queued.tenant, queued.deadline, queued.sampling.n) == ("a", 9.0, 2)
