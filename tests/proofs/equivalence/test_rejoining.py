"""A request that was retracted and goes on from host memory says what it says where it is never retracted."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from core.config import EngineConfig, ExecutorConfig, LoraConfig, MemoryConfig, ModelConfig, SchedulerConfig
from core.engine.async_engine import AsyncEngine
from core.engine.build import build_engine
from core.types.constraint import Constraint, ConstraintKind
from core.types.io import Delta, GenerateRequest
from core.types.sampling_params import SamplingParams
from core.types.stats import EngineStats
from tests.support.engines import started
from tests.support.sampling_matrix import SAMPLING_MATRIX
from tests.unit.core.models.lora.peft_oracle import ADAPTERS, make_adapter

PAGE, ROWS, OUTPUT = 4, 6, 40
ROOMY = ROWS * 20
TIGHT = 32
"""Pages: six rows of up to fifteen pages do not fit; one does."""
ROOM = 1 << 26

Answer = list[tuple[int, float | None]]


def config(directory: Path, pages: int, *, room: int, overlap: bool, cache: str, **scheduler: Any) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(str(directory), dtype="float32"),
        memory=MemoryConfig(
            page_size=PAGE,
            max_running_requests=ROWS,
            max_total_tokens=pages * PAGE,
            prefix_cache=cache,
            host_cache_bytes=room,
        ),
        scheduler=SchedulerConfig(chunked_prefill_size=16, **scheduler),
        executor=ExecutorConfig(device="cpu", overlap=overlap, assert_mode="trap", cpu_threads=1),
    )


def requests(seed: int = 5) -> list[GenerateRequest]:
    """One for each kind of option, and two that follow a grammar; prompts share their first tokens, two by two."""
    rng, found = random.Random(seed), list[GenerateRequest]()
    for place, options in enumerate(SAMPLING_MATRIX.values()):
        if place % 2 == 0:
            prompt = [rng.randrange(3, 90) for _ in range(rng.randint(3, 20))]
        sampling = SamplingParams(**{"ignore_eos": True, "seed": place, **options, "max_tokens": OUTPUT})
        found.append(GenerateRequest(token_ids=(*prompt, place), sampling=sampling, want_text=False))
    for place in range(2):
        sampling = SamplingParams(temperature=1.0, seed=place, max_tokens=OUTPUT)
        rule = Constraint(ConstraintKind.REGEX, "[a-z ]{60,200}")
        found.append(GenerateRequest(token_ids=(5, 6, place + 7), sampling=sampling, constraint=rule, want_text=False))
    return found


async def answer(engine: AsyncEngine, request: GenerateRequest) -> Answer:
    found: Answer = []
    async for event in await engine.generate(request):
        if isinstance(event, Delta):
            told = [each.logprob for each in event.logprobs] if event.logprobs else [None] * len(event.token_ids)
            found += zip(event.token_ids, told, strict=True)
    return found


async def answers(made: EngineConfig, asked: list[GenerateRequest]) -> tuple[list[Answer], EngineStats]:
    async with started(build_engine(made)) as engine:
        found = await asyncio.gather(*(answer(engine, request) for request in asked))
        return found, engine.stats


@pytest.mark.parametrize("cache", ["radix", "none"])
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "inline"])
async def test_tokens_are_those_of_an_engine_with_room(
    checkpoint_of: Callable[[str], Path], overlap: bool, cache: str
) -> None:
    directory, asked = checkpoint_of("llama"), requests()
    same = {"overlap": overlap, "cache": cache}
    expected, roomy = await answers(config(directory, ROOMY, room=0, **same), asked)
    found, stats = await answers(config(directory, TIGHT, room=ROOM, **same), asked)
    assert roomy.preemptions == 0
    for want, got in zip(expected, found, strict=True):
        assert [token for token, _ in got] == [token for token, _ in want]
        assert [lp for _, lp in got] == pytest.approx([lp for _, lp in want], abs=1e-4, nan_ok=True)
    assert stats.preemptions >= 3 and stats.rejoined_requests >= 3, stats
    assert stats.host_cache_bytes == 0 and stats.leased_pages == 0
    assert all(pool.used == 0 for pool in stats.pools)


async def test_rows_come_back_with_their_adapters(checkpoint_of: Callable[[str], Path], tmp_path: Path) -> None:
    """Keys and values depend on the adapter, and so does what the row says behind them."""
    directory = checkpoint_of("llama")
    lora = LoraConfig(adapters=(("one", str(make_adapter(directory, tmp_path, 3, **ADAPTERS["all"]))),))
    asked = [dataclasses.replace(each, adapter="one" if n % 2 else "") for n, each in enumerate(requests()[:8])]
    engines = [
        dataclasses.replace(config(directory, pages, room=room, overlap=True, cache="radix"), lora=lora)
        for pages, room in ((ROOMY, 0), (TIGHT, ROOM))
    ]
    (expected, _), (found, stats) = [await answers(each, asked) for each in engines]
    assert [[token for token, _ in each] for each in found] == [[token for token, _ in each] for each in expected]
    plain, _ = await answers(config(directory, ROOMY, room=0, overlap=True, cache="radix"), requests()[1:2])
    assert plain[0] != expected[1], "the adapter says something else"
    assert stats.rejoined_requests >= 2, stats


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "inline"])
@pytest.mark.parametrize("family", ["gemma3_text", "falcon_h1", "mamba2"])
async def test_rows_that_hold_more_than_keys_go_on_from_the_end_of_a_page(
    checkpoint_of: Callable[[str], Path], family: str, overlap: bool
) -> None:
    """With the window, or the state, that was there."""
    directory, asked = checkpoint_of(family), requests()
    same: dict[str, Any] = {"overlap": overlap, "cache": "radix"}
    roomy, tight = (config(directory, pages, room=room, **same) for pages, room in ((ROOMY, 0), (TIGHT, ROOM)))
    tight = dataclasses.replace(tight, memory=dataclasses.replace(tight.memory, state_track_interval=PAGE))
    expected, _ = await answers(roomy, asked)
    async with started(build_engine(tight)) as engine:
        found = await asyncio.gather(*(answer(engine, request) for request in asked))
        stats = engine.stats
        engine.prefixes.flush()
        assert engine.stats.host_cache_bytes == 0, "prefixes alone are left"
    assert [[token for token, _ in each] for each in found] == [[token for token, _ in each] for each in expected]
    assert stats.preemptions >= 3 and stats.rejoined_requests >= 2, stats
    assert stats.leased_pages == 0
