"""The engine in process: over an emulated device that takes no time, so that a step is the host's, or a checkpoint."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from core.config import EngineConfig, ExecutorConfig, MemoryConfig, ModelConfig, SchedulerConfig
from core.engine.async_engine import AsyncEngine
from core.engine.build import assemble, build_engine
from core.engine.built_engine import BuiltEngine
from core.models.bundled import bundled_model_dir
from core.text.tokenizer import Tokenizer
from core.types.io import Delta
from core.types.sampling_params import SamplingParams
from service.bench.emulated import EmulatedModel, EmulatedStreams, Timeline
from service.bench.features import PLAIN, Feature

CHUNK = 2048
"""Prompt tokens of one step."""


@dataclass(frozen=True, slots=True)
class Shape:
    """An engine and its requests. `vocab` 0 is the tokenizer's own; `checkpoint` "" is the emulated device."""

    requests: int
    prompt: int = 16
    tokens: int = 64
    vocab: int = 0
    checkpoint: str = ""
    chunk: int = CHUNK
    """Prompt tokens of one step. For many long prompts it must be the sum of them all: with less the first request ends
    before the last begins."""


@dataclass(frozen=True, slots=True)
class Pace:
    """The figures of one round. `step` and `prefill` are seconds of processor time, of all threads together.

    `step` is for one decode step while all requests decode; `prefill` is for everything up to the last first token.
    Other work of the machine does not count in these two, but it does in `tokens_per_second`.
    """

    step: float
    prefill: float
    tokens_per_second: float


@asynccontextmanager
async def started(shape: Shape) -> AsyncIterator[AsyncEngine]:
    """An engine of that shape, stopped at the end. No prefix is reused, so every round does the same."""
    context = shape.prompt + shape.tokens + 1
    room = shape.requests * (shape.prompt + shape.tokens + 32)
    config = EngineConfig(
        model=ModelConfig(shape.checkpoint or "emulated", native="off"),
        memory=MemoryConfig(max_running_requests=shape.requests, max_total_tokens=room, prefix_cache="none"),
        scheduler=SchedulerConfig(chunked_prefill_size=shape.chunk, max_queued_requests=shape.requests),
        executor=ExecutorConfig(device="cpu", cpu_threads=1),
    )
    built = build_engine(config) if shape.checkpoint else _emulated(config, shape.vocab, context)
    engine = await built.start()
    try:
        yield engine
    finally:
        await engine.stop()


def _emulated(config: EngineConfig, vocab: int, context: int) -> BuiltEngine:
    tokenizer, timeline = Tokenizer.load(str(bundled_model_dir())), Timeline(0.0)
    model = EmulatedModel(timeline, vocab or tokenizer.vocab_size, context)
    return assemble(config, model, tokenizer, EmulatedStreams(timeline))


async def pace(engine: AsyncEngine, shape: Shape, feature: Feature = PLAIN) -> Pace:
    """Run all requests at once, each read by its own task. The pace counts from the last first token to the first end.

    Raises RuntimeError if too few steps had all requests in them.
    """
    prompts = [[3 + (index + at) % 200 for at in range(shape.prompt)] for index in range(shape.requests)]
    everyone = asyncio.Barrier(shape.requests + 1)
    began = time.process_time()
    readers = [asyncio.create_task(_read(engine, ids, shape.tokens, everyone, feature)) for ids in prompts]
    await everyone.wait()
    since, spent, first = time.perf_counter(), time.process_time(), engine.stats.step
    await asyncio.wait(readers, return_when=asyncio.FIRST_COMPLETED)
    steps = engine.stats.step - first
    if steps < shape.tokens // 4:
        raise RuntimeError(f"only {steps} steps had all {shape.requests} requests in them")
    found = Pace((time.process_time() - spent) / steps, spent - began, 0.0)
    rate = steps * shape.requests / (time.perf_counter() - since)
    await asyncio.gather(*readers)
    return replace(found, tokens_per_second=rate)


async def _read(
    engine: AsyncEngine, ids: Sequence[int], tokens: int, everyone: asyncio.Barrier, feature: Feature
) -> None:
    """Read one stream to its end; after its first token wait for the first tokens of the others."""
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    waited = False
    async for event in await engine.generate(feature.request(list(ids), sampling)):
        if isinstance(event, Delta) and not waited:
            waited = True
            await everyone.wait()


def paces(shape: Shape, rounds: int, features: dict[str, Feature] | None = None) -> dict[str, Pace]:
    """Medians of `rounds` rounds by feature, after one round that does not count. Features take turns in each round."""

    async def run() -> dict[str, list[Pace]]:
        async with started(shape) as engine:
            seen: dict[str, list[Pace]] = {name: [] for name in features or {"plain": PLAIN}}
            for number in range(rounds + 1):
                for name, found in seen.items():
                    one = await pace(engine, shape, (features or {}).get(name, PLAIN))
                    if number:
                        found.append(one)
            return seen

    return {name: _median(found) for name, found in asyncio.run(run()).items()}


def _median(found: list[Pace]) -> Pace:
    return Pace(*(statistics.median(getattr(each, name) for each in found) for name in Pace.__slots__))
