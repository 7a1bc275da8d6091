"""Memory that runs out inside a step splits the step or ends one request; the neighbours notice nothing."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from core.batch.forward_batch import ForwardBatch
from core.batch.result import StepOutOfMemory
from core.engine.api import EngineState
from core.engine.async_engine import AsyncEngine
from core.errors import EngineDead, Overloaded, SlipstreamError
from core.executor.pooling import Pooler
from core.executor.sampling_step import SamplingStep
from core.sampling.draw import BLOCK
from core.text.tokenizer import Tokenizer
from core.types.constraint import Constraint
from core.types.io import Delta, EmbedRequest, GenerateRequest
from service.bench.emulated import expected_output
from tests.proofs.constraints.test_endings import plant
from tests.support.fakes.step_grammar import StepGrammar
from tests.support.fakes.tight_allocator import ERRORS, TightAllocator
from tests.support.until import until
from tests.unit.core.engine.emulation import HookedModel, ask, last, read, running

PROMPT = (5, 6, 7)


class HiddenModel(HookedModel):
    """Gives hidden states too: embeddings run beside."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self.spec = dataclasses.replace(self.spec, hidden_size=8)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        if batch.wants_hidden:
            batch.hidden = (batch.input_ids + batch.positions)[:, None].float().expand(-1, 8).contiguous()
        return super().forward(batch)


class Tight:
    """The memory beside the model: no operation of `parts` gets more than `limit` bytes at once, or what `fails`."""

    def __init__(self, patch: pytest.MonkeyPatch, *parts: tuple[type, str]) -> None:
        self.limit = 1 << 60
        self.fails: Callable[[int], bool] = lambda size: False
        self.refused = 0
        self.error: Callable[[], Exception] = ERRORS[0]
        for owner, name in parts:
            patch.setattr(owner, name, self._tightened(getattr(owner, name)))

    def _tightened(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def refuses(size: int) -> bool:
            refused = size > self.limit or self.fails(size)
            self.refused += refused
            return refused

        def tightened(*arguments: Any) -> Any:
            with TightAllocator(refuses, self.error):
                return inner(*arguments)

        return tightened


def row_bytes(tokenizer: Tokenizer) -> int:
    """Of one row in float64, padded: the most that drawing a token allocates at once."""
    return 8 * -(-tokenizer.vocab_size // BLOCK) * BLOCK


def requests(constraint: Constraint) -> list[GenerateRequest]:
    """Every option that takes memory, each beside the others."""
    options: tuple[dict[str, Any], ...] = (
        {},
        {"temperature": 0.9, "seed": 1},
        {"temperature": 0.8, "seed": 2, "top_k": 40, "top_p": 0.95},
        {"temperature": 0.7, "seed": 3, "frequency_penalty": 0.6, "presence_penalty": 0.3},
        {"repetition_penalty": 1.4},
        {"temperature": 1.1, "seed": 4, "logprobs": True, "top_logprobs": 5},
        {"logprobs": True, "top_logprobs": 2, "min_p": 0.1},
        {"temperature": 0.9, "seed": 5, "n": 2},
    )
    asked = [ask((9 + place, 3), tokens=24, **option) for place, option in enumerate(options)]
    return [*asked, ask(PROMPT, tokens=24, temperature=0.9, seed=6, ignore_eos=False, constraint=constraint)]


async def until_it_ends(engine: AsyncEngine, request: GenerateRequest) -> tuple[dict[tuple[int, str], list[Any]], bool]:
    """Tokens and log probabilities by output, and whether memory ended the request."""
    got: dict[tuple[int, str], list[Any]] = {}
    try:
        async for event in await engine.generate(request):
            if isinstance(event, Delta):
                got.setdefault((event.index, "tokens"), []).extend(event.token_ids)
                got.setdefault((event.index, "logprobs"), []).extend(event.logprobs or ())
    except SlipstreamError as error:
        assert isinstance(error, Overloaded) and error.reason == "DEVICE_MEMORY", error
        return got, True
    return got, False


async def outputs(engine: AsyncEngine, request: GenerateRequest) -> dict[tuple[int, str], list[Any]]:
    """Tokens and log probabilities by output."""
    got, was_ended = await until_it_ends(engine, request)
    assert not was_ended, "memory ended a request"
    return got


async def embedding(engine: AsyncEngine, prompt: tuple[int, ...]) -> list[float]:
    result = await (await engine.embed(EmbedRequest(inputs=(prompt,)))).result()
    return list(map(float, result.embeddings[0].values))


async def everything(engine: AsyncEngine) -> list[Any]:
    asked = [outputs(engine, each) for each in requests(plant(engine, StepGrammar(), "steps"))]
    vectors = [embedding(engine, (1, 2, 3, place)) for place in range(3)]
    return list(await asyncio.gather(*asked, *vectors))


@pytest.mark.parametrize("overlap", [True, False])
async def test_steps_are_split_and_all_outputs_stay_the_same(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    tight = Tight(monkeypatch, (SamplingStep, "sample"))
    async with running(tokenizer, HiddenModel(tokenizer), overlap=overlap, max_running_requests=16) as engine:
        wanted = await everything(engine)
        assert engine.stats.split_steps == 0
        tight.limit = 2 * row_bytes(tokenizer)
        for tight.error in ERRORS:
            assert await everything(engine) == wanted
        assert engine.stats.split_steps > 20 < tight.refused
        assert not any(engine.stats.assert_failures.values())
        assert "device_memory" not in engine.stats.finished and engine.state is EngineState.READY


@pytest.mark.parametrize("overlap", [True, False])
async def test_a_row_that_does_not_fit_alone_ends_alone(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    tight = Tight(monkeypatch, (SamplingStep, "sample"))
    async with running(tokenizer, overlap=overlap) as engine:
        constraint = plant(engine, StepGrammar(), "steps")
        neighbours = [
            ask((3, 3), tokens=40),
            ask((4, 4), tokens=40, repetition_penalty=1.5),
            ask((5, 5), tokens=40, logprobs=True),
            ask((6, 6), tokens=40, ignore_eos=False, constraint=constraint),
        ]
        wanted = await asyncio.gather(*(outputs(engine, each) for each in neighbours))
        tight.limit = row_bytes(tokenizer) * 3 // 4
        beside = [asyncio.create_task(outputs(engine, each)) for each in neighbours]
        for _ in range(3):
            doomed = await engine.generate(ask((1, 1), tokens=200, logprobs=True, top_logprobs=3))
            with pytest.raises(Overloaded) as caught:
                await last(doomed)
            assert caught.value.reason == "DEVICE_MEMORY" and caught.value.retry_after > 0
        assert await asyncio.gather(*beside) == wanted
        assert engine.stats.finished["device_memory"] == 3 and engine.state is EngineState.READY
        await until(lambda: all(pool.used == 0 for pool in engine.stats.pools))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("overlap", [True, False])
async def test_memory_that_runs_out_at_random_ends_requests_and_never_the_engine(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, overlap: bool, seed: int
) -> None:
    tight, rng, most = Tight(monkeypatch, (SamplingStep, "sample")), random.Random(seed), 16
    async with running(tokenizer, overlap=overlap, max_running_requests=most) as engine:
        asked = requests(plant(engine, StepGrammar(), "steps"))
        wanted = await asyncio.gather(*(outputs(engine, each) for each in asked))
        # The tokens of all rows need 8 bytes each, which a step cannot do without.
        tight.fails = lambda size: size > 8 * most and rng.random() < 0.03
        ended = 0
        for tight.error in ERRORS:
            found = await asyncio.gather(*(until_it_ends(engine, each) for each in asked))
            for (got, was_ended), whole in zip(found, wanted, strict=True):
                ended += was_ended
                assert got.keys() == whole.keys() or was_ended
                assert all(got[key] == whole[key][: len(got[key]) if was_ended else None] for key in got)
        assert engine.state is EngineState.READY and not any(engine.stats.assert_failures.values())
        # Two outputs of one request may end at once.
        assert engine.stats.finished["device_memory"] >= ended and 0 < ended < 3 * len(asked)
        assert engine.stats.split_steps > 10
        await until(lambda: all(pool.used == 0 for pool in engine.stats.pools))


@pytest.mark.parametrize("overlap", [True, False])
async def test_alternatives_that_do_not_fit_into_the_output_end_those_that_asked(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    tight, wide = Tight(monkeypatch, (SamplingStep, "sample")), 13
    async with running(tokenizer, overlap=overlap) as engine:
        neighbours = [
            ask((3, 3), tokens=40),
            ask((4, 4), tokens=40, temperature=0.8, seed=1),
            ask((5, 5), tokens=40, logprobs=True, top_logprobs=2),
            ask((6, 6), tokens=40, logprobs=True),
        ]
        wanted = await asyncio.gather(*(outputs(engine, each) for each in neighbours))
        tight.fails = lambda size: size in {rows * wide * 8 for rows in range(1, 9)}
        beside = [asyncio.create_task(outputs(engine, each)) for each in neighbours]
        for _ in range(3):
            _, was_ended = await until_it_ends(engine, ask((1, 1), tokens=200, logprobs=True, top_logprobs=wide))
            assert was_ended
        assert await asyncio.gather(*beside) == wanted
        assert engine.stats.finished["device_memory"] == 3 and engine.state is EngineState.READY
        await until(lambda: all(pool.used == 0 for pool in engine.stats.pools))


@pytest.mark.parametrize("overlap", [True, False])
async def test_the_history_of_penalties_fails_those_with_penalties(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    tight = Tight(monkeypatch, (SamplingStep, "begin"))
    penalised = ask((8, 9), tokens=20, repetition_penalty=1.5, frequency_penalty=0.4, presence_penalty=0.3)
    async with running(tokenizer, overlap=overlap) as engine:
        wanted = await outputs(engine, penalised)
    async with running(tokenizer, overlap=overlap) as engine:
        tight.limit = 1000
        neighbour = asyncio.create_task(read(engine, ask((3, 3), tokens=200)))
        for _ in range(3):
            with pytest.raises(SlipstreamError) as caught:
                await last(await engine.generate(penalised))
            assert isinstance(caught.value, Overloaded) and "no memory" in str(caught.value)
        tight.limit = 1 << 60
        try:
            served = await outputs(engine, penalised)
        except Overloaded:
            served = []
        assert served == wanted, "once there is memory, the same row is served"
        assert (await neighbour)[0] == expected_output([3, 3], 200, tokenizer.vocab_size)
        assert engine.stats.finished["device_memory"] == 3 and tight.refused == 3


async def test_embeddings_without_memory_end_and_the_tokens_beside_them_do_not(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tight = Tight(monkeypatch, (Pooler, "pool"))
    async with running(tokenizer, HiddenModel(tokenizer)) as engine:
        wanted = await embedding(engine, (1, 2, 3))
        tight.limit = 8
        neighbour = asyncio.create_task(read(engine, ask((3, 3), tokens=200)))
        for _ in range(3):
            with pytest.raises(Overloaded):
                await asyncio.wait_for(embedding(engine, (1, 2, 3)), 10)
        tight.limit = 1 << 60
        assert await embedding(engine, (1, 2, 3)) == wanted
        assert (await neighbour)[0] == expected_output([3, 3], 200, tokenizer.vocab_size)
        assert engine.stats.finished["device_memory"] == 3


@pytest.mark.parametrize("overlap", [True, False])
async def test_a_forward_pass_without_memory_says_how_much_was_missing(tokenizer: Tokenizer, overlap: bool) -> None:
    model = HookedModel(tokenizer)

    def fail(step: int, logits: torch.Tensor, batch: ForwardBatch) -> None:
        if step == 10:
            raise ERRORS[0]()

    model.hook = fail
    async with running(tokenizer, model, overlap=overlap) as engine:
        stream = await engine.generate(ask((1, 2), tokens=200, frequency_penalty=0.5, logprobs=True, top_logprobs=3))
        with pytest.raises(EngineDead) as caught:
            await asyncio.wait_for(last(stream), 10)
        assert "GiB" not in str(caught.value), "what the server has is not for its clients"
        cause = await asyncio.wait_for(engine.wait_dead(), 10)
        assert isinstance(cause, StepOutOfMemory) and isinstance(cause.__cause__, torch.OutOfMemoryError)
        told = "step 10 (decode: 1 rows, 1 tokens, 1 sampled; penalties, log probabilities, 3 alternatives)"
        assert told in str(cause) and "wanted 2.00 GiB" in str(cause) and "are free" in str(cause)
