"""`slipstream bench host-cache`: what copies in host memory and in files save of prompts that the device has given up.

All ways are measured by turns in the same rounds, each in an engine of its own: prefixes that are computed again,
prefixes that come back from files or from host memory, and prefixes that never left the device, which is the bound.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

import click
import torch

from core.config import EngineConfig, ExecutorConfig, MemoryConfig, ModelConfig, SchedulerConfig
from core.engine.async_engine import AsyncEngine
from core.engine.build import build_engine
from core.types.io import Delta, GenerateRequest
from core.types.sampling_params import SamplingParams
from service.bench.family_shapes import FAMILY_SHAPES
from service.bench.random_checkpoint import save_random_checkpoint
from service.bench.workloads import FIRST_ID

PREFIX, REST = 4096, 40
"""Tokens of a prefix, and of what each request asks behind it, which is no whole number of pages."""
TURNS: Final = 3
CONTEXT: Final = PREFIX + 256
PROMPTS: Final = 3
"""Prefixes that take turns; the small pool holds one of them, and what is asked behind it."""
TALKS, HELD, SAID, ANSWER = 64, 24, 384, 32
"""Conversations, how many of them the pool holds, tokens of what each begins with, and of each answer."""
HOST_BYTES: Final = 4 << 30
WAYS: Final = {
    "computed again": (False, 0, False),
    "from files": (False, HOST_BYTES, True),
    "from host memory": (False, HOST_BYTES, False),
    "kept on the device": (True, 0, False),
}
"""Way -> whether the pool holds everything, bytes of host memory, and whether files are kept, which are read by another
engine: the one that has written them has all of it in memory."""


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds by way: to the first token behind a prefix of `PREFIX` tokens, and of second turns of all `TALKS`."""

    ttft: dict[str, float]
    turns: dict[str, float]


@click.command("host-cache")
@click.option("--family", default="llama", show_default=True, help="Of the model, as in bench cpu --families.")
@click.option("--dtype", default="bfloat16", show_default=True, help="Of the weights.")
@click.option("--rounds", default=5, show_default=True, help="Rounds of all ways; medians are reported.")
@click.option("--threads", default=2, show_default=True, help="Of each engine.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line.")
def host_cache(family: str, dtype: str, rounds: int, threads: int, as_json: bool) -> None:
    """Prefixes that come back from host memory or from files beside prefixes that are computed again.

    Seconds to the first token behind a prefix of 4,096 tokens that the device has given up, and seconds of the second
    turns of 64 conversations in a pool for 24.
    """
    found = measure_host_cache(family, dtype, rounds, threads)
    shown = [
        (f"first token behind {PREFIX:,} tokens that were given up", found.ttft),
        (f"second turns of {TALKS} conversations in a pool for {HELD}", found.turns),
    ]
    for title, seconds in shown:
        click.echo(title)
        for way, each in seconds.items():
            click.echo(f"  {way:<22}{each:10.4f} s{each / seconds['computed again']:9.3f} x")
    if as_json:
        click.echo(json.dumps({"ttft": found.ttft, "turns": found.turns}))


def measure_host_cache(family: str, dtype: str, rounds: int, threads: int) -> Times:
    """Make the model, and measure all ways in each of `rounds` rounds, behind one that warms up."""
    with tempfile.TemporaryDirectory() as name:
        shape = FAMILY_SHAPES[family] | {"model_type": family, "max_position_embeddings": CONTEXT}
        save_random_checkpoint(shape, getattr(torch, dtype), Path(name))
        ttft = asyncio.run(_measured(name, dtype, rounds, threads, _first_tokens, CONTEXT))
        turns = asyncio.run(_measured(name, dtype, rounds, threads, _second_turns, HELD * (SAID + 3 * ANSWER)))
    return Times(ttft, turns)


async def _measured(name: str, dtype: str, rounds: int, threads: int, work: Any, tokens: int) -> dict[str, float]:
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(rounds + 1):
        for way, (everything, nbytes, files) in WAYS.items():
            # An engine each time: none finds what an earlier round has left.
            with tempfile.TemporaryDirectory(dir=name) as folder:
                room, kept = 4 * tokens if everything else tokens, folder if files else None
                engines = _Engines(partial(_engine, name, dtype, threads, room, nbytes, kept), renews=files)
                async with engines:
                    seconds[way].append(await work(engines, random.Random(number)))
    return {way: median(each[1:]) for way, each in seconds.items()}


class _Engines:
    """The engine of one measurement, and if it `renews` another one for the second turn."""

    def __init__(self, build: Callable[[], Awaitable[AsyncEngine]], *, renews: bool) -> None:
        self._build, self._renews = build, renews
        self._now: AsyncEngine | None = None

    async def turn(self) -> AsyncEngine:
        """The engine for the next turn."""
        if self._now is not None and self._renews:
            # What was copied last is still being written.
            while self._now.stats.disk_pending_chunks:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await self.__aexit__()
        self._now = self._now or await self._build()
        return self._now

    async def __aenter__(self) -> _Engines:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._now is not None:
            await self._now.stop()
            self._now = None


async def _engine(
    name: str, dtype: str, threads: int, tokens: int, nbytes: int, files: str | None = None
) -> AsyncEngine:
    built = build_engine(
        EngineConfig(
            model=ModelConfig(name, dtype=dtype, native="wait"),
            memory=MemoryConfig(16, TALKS, tokens, host_cache_bytes=nbytes, disk_cache=files),
            scheduler=SchedulerConfig(),
            executor=ExecutorConfig(device="cpu", cpu_threads=threads),
        )
    )
    engine = await built.start()
    await _ask(engine, [FIRST_ID] * 32, 8)
    return engine


async def _first_tokens(engines: _Engines, pick: random.Random) -> float:
    """Median seconds to a first token of prefixes that are asked by turns, each for the third time, and otherwise each.

    A model with recurrent states goes on within a prompt from the third question on (decision 63).
    """
    prefixes = [_ids(pick, PREFIX) for _ in range(PROMPTS)]
    found = []
    for turn in range(TURNS):
        engine = await engines.turn()
        for prefix in prefixes:
            seconds, _ = await _ask(engine, prefix + _ids(pick, REST), 2)
            if turn == TURNS - 1:
                found.append(seconds)
    return median(found)


async def _second_turns(engines: _Engines, pick: random.Random) -> float:
    """Seconds in which all conversations, at once, get their second answer."""
    said = [_ids(pick, SAID) for _ in range(TALKS)]
    engine = await engines.turn()
    answers = await asyncio.gather(*(_ask(engine, each, ANSWER) for each in said))
    asked = [(*first, *answer, *_ids(pick, REST)) for first, (_, answer) in zip(said, answers, strict=True)]
    engine = await engines.turn()
    began = time.perf_counter()
    await asyncio.gather(*(_ask(engine, each, ANSWER) for each in asked))
    return time.perf_counter() - began


async def _ask(engine: AsyncEngine, prompt: Sequence[int], most: int) -> tuple[float, list[int]]:
    """(seconds to the first token, all tokens)."""
    sampling = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True)
    began, first, tokens = time.perf_counter(), 0.0, list[int]()
    async for event in await engine.generate(
        GenerateRequest(token_ids=tuple(prompt), sampling=sampling, want_text=False)
    ):
        if isinstance(event, Delta):
            first = first or time.perf_counter() - began
            tokens.extend(event.token_ids)
    return first, tokens


def _ids(pick: random.Random, count: int) -> list[int]:
    return [pick.randrange(FIRST_ID, 4096) for _ in range(count)]
