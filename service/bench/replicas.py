"""`slipstream bench replicas`: what several engines behind one server bring, and what the router before them does.

All ways are measured by turns in the same rounds: one engine in this process, one in a process of its own, and several.
Conversations go through several engines with the router, and in turn without it.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import time
from collections.abc import Iterable
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Final

import click
import torch

from core.engine.api import Engine
from core.engine.build import build_engine
from core.types.io import Delta, Finished, GenerateRequest
from core.types.sampling_params import SamplingParams
from service.bench.family_shapes import FAMILY_SHAPES
from service.bench.random_checkpoint import save_random_checkpoint
from service.bench.workloads import FIRST_ID
from service.config.server_config import ServerConfig
from service.process.switch_interval import shorten_switch_interval
from service.replicas.builder import BuiltReplicas
from service.replicas.open_requests import OpenRequests
from service.replicas.prompt_pieces import Prompt
from service.replicas.replica_engine import ReplicaEngine
from service.replicas.replica_set import ReplicaSet
from service.replicas.router import Router
from service.replicas.spawned import spawn

STREAMS: Final = (1, 64)
PROMPT, ANSWER = 128, 64
"""Tokens of each request of the first part, and of its output."""
TALKS, TURNS, SAID, MORE = 12, 4, 512, 32
"""Conversations for each engine and how often each is asked; tokens of its beginning, and of what each turn adds."""
CONTEXT: Final = 1024


class InTurn(Router):
    """Sends each request to the next engine, whatever it has computed: what a Service does with new connections."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self._next = 0

    def order(self, prompt: Prompt, places: Iterable[int]) -> list[int]:
        """`places`, the next one first."""
        known = list(places)
        self._next = (self._next + 1) % len(known)
        return known[self._next :] + known[: self._next]


@dataclass(frozen=True, slots=True)
class Figures:
    """`rates`: output tokens per second, by streams and way. `seconds` and `cached`: of all turns, and the share of
    their prompts that was not computed again, by way.
    """

    rates: dict[int, dict[str, float]]
    seconds: dict[str, float]
    cached: dict[str, float]


@click.command()
@click.option("--engines", type=click.IntRange(min=2), default=2, show_default=True, help="Engines behind the server.")
@click.option("--family", default="llama", show_default=True, help="Of the model, as in bench cpu --families.")
@click.option("--dtype", default="bfloat16", show_default=True, help="Of the weights.")
@click.option("--rounds", default=3, show_default=True, help="Rounds of all ways behind a warm-up; medians are told.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line.")
def replicas(engines: int, family: str, dtype: str, rounds: int, as_json: bool) -> None:
    """Several engines behind one server, beside one engine with all of the machine.

    Output tokens per second of one stream and of 64: of an engine in this process, of one in a process of its own, and
    of several, each with its part of the cores. On a CPU they share the cores that one engine has for itself; with a
    GPU for each they would not.

    Then conversations of four turns, each of which repeats all that was said: with the router, which knows what each
    engine has computed, and in turn. Seconds for all of them, and the share of prompts that came from a cache.
    """
    shorten_switch_interval(writes=False)
    with tempfile.TemporaryDirectory() as name:
        shape = FAMILY_SHAPES[family] | {"model_type": family, "max_position_embeddings": CONTEXT}
        save_random_checkpoint(shape, getattr(torch, dtype), Path(name))
        found = asyncio.run(_measured(name, dtype, engines, rounds))
    for streams, rates in found.rates.items():
        click.echo(f"{streams} streams of {PROMPT} + {ANSWER} tokens")
        for way, rate in rates.items():
            click.echo(f"  {way:<28}{rate:10,.0f} tokens/s{rate / rates['one engine']:9.3f} x")
    click.echo(f"{TALKS * engines} conversations of {TURNS} turns behind {SAID} tokens")
    for way, seconds in found.seconds.items():
        ratio = seconds / found.seconds["in turn"]
        click.echo(f"  {way:<28}{seconds:10.3f} s{ratio:9.3f} x{found.cached[way]:9.1%} of prompts cached")
    if as_json:
        click.echo(json.dumps(asdict(found)))


async def _measured(name: str, dtype: str, engines: int, rounds: int) -> Figures:
    room = max(STREAMS) * (PROMPT + ANSWER) + TALKS * engines * CONTEXT
    settings = {"model": name, "dtype": dtype, "native": "wait", "device": "cpu", "max_total_tokens": room}
    several = f"{engines} engines"
    async with AsyncExitStack() as stack:
        alone = await build_engine(ServerConfig.of(**settings).engine_config()).start()
        stack.push_async_callback(alone.stop)
        one = await _started(settings, 1, stack)
        all_engines = await _started(settings, engines, stack)
        in_turn = await _started(settings, engines, stack, InTurn(engines))
        ways: dict[str, Engine] = {"one engine": alone, "one in a process of its own": one, several: all_engines}
        rates: dict[int, dict[str, list[float]]] = {streams: {way: [] for way in ways} for streams in STREAMS}
        seconds: dict[str, list[float]] = {"in turn": [], "with the router": []}
        cached: dict[str, list[float]] = {way: [] for way in seconds}
        for number in range(rounds + 1):
            pick = random.Random(number)
            for streams, by_way in rates.items():
                for way, engine in ways.items():
                    by_way[way].append(await _rate(engine, streams, pick))
            for way, engine in zip(seconds, (in_turn, all_engines), strict=True):
                took, known = await _conversations(engine, TALKS * engines, random.Random(number))
                seconds[way].append(took)
                cached[way].append(known)
    return Figures(
        {streams: {way: median(found[1:]) for way, found in by_way.items()} for streams, by_way in rates.items()},
        {way: median(found[1:]) for way, found in seconds.items()},
        {way: median(found[1:]) for way, found in cached.items()},
    )


async def _started(
    settings: dict[str, object], count: int, stack: AsyncExitStack, router: Router | None = None
) -> ReplicaSet:
    built = BuiltReplicas(ServerConfig.of(**settings, data_parallel=count), False, None, spawn)
    requests = OpenRequests()

    def make(_place: int) -> ReplicaEngine:
        return ReplicaEngine(built.config.engine.max_pending_tokens, lambda stage, part: None, requests.ended)

    engines = await ReplicaSet(built.orders(), spawn, make, requests, router).start()
    stack.push_async_callback(engines.stop)
    return engines


async def _rate(engine: Engine, streams: int, pick: random.Random) -> float:
    """Output tokens per second of so many requests at once."""
    prompts = [_ids(pick, PROMPT) for _ in range(streams)]
    began = time.perf_counter()
    answers = await asyncio.gather(*(_answer(engine, prompt, ANSWER) for prompt in prompts))
    return sum(len(answer) for answer, _ in answers) / (time.perf_counter() - began)


async def _conversations(engine: Engine, count: int, pick: random.Random) -> tuple[float, float]:
    """Seconds until all conversations have had all their turns, and the share of prompts that was cached."""
    beginnings = [_ids(pick, SAID) for _ in range(count)]
    additions = [[_ids(pick, MORE) for _ in range(TURNS)] for _ in range(count)]
    began, asked, cached = time.perf_counter(), 0, 0

    async def talk(said: tuple[int, ...], more: list[tuple[int, ...]]) -> None:
        nonlocal asked, cached
        for addition in more:
            said += addition
            answer, known = await _answer(engine, said, MORE)
            asked, cached, said = asked + len(said), cached + known, said + answer

    await asyncio.gather(*map(talk, beginnings, additions))
    return time.perf_counter() - began, cached / asked


async def _answer(engine: Engine, prompt: tuple[int, ...], tokens: int) -> tuple[tuple[int, ...], int]:
    """The output for `prompt`, and how much of the prompt came from a cache."""
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    answer: tuple[int, ...] = ()
    cached = 0
    async for event in await engine.generate(GenerateRequest(token_ids=prompt, sampling=sampling, want_text=False)):
        if isinstance(event, Delta):
            answer += event.token_ids
        elif isinstance(event, Finished):
            cached = event.usage.cached_tokens
    return answer, cached


def _ids(pick: random.Random, count: int) -> tuple[int, ...]:
    return tuple(pick.randrange(FIRST_ID, 4096) for _ in range(count))
