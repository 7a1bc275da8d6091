"""`slipstream bench pd`: what it costs that one engine computes a prompt and another one decodes it.

First tokens through two engines are measured beside those of one, and keys beside bytes that go without our protocol
(`service.bench.key_rates`), each pair by turns. Ends with status 1 if the keys of a request do not arrive.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Final

import click
import torch

from core.config import DisaggConfig, EngineConfig, ExecutorConfig, MemoryConfig, ModelConfig, SchedulerConfig
from core.disagg.interface import TransferFailed
from core.engine.async_engine import AsyncEngine
from core.engine.build import build_engine
from core.types.handover import Handed, HandOver, TakeOver
from core.types.io import Delta, Finished, GenerateRequest
from core.types.sampling_params import SamplingParams
from service.bench.family_shapes import FAMILY_SHAPES
from service.bench.key_rates import measure_rates
from service.bench.plain_bytes import PLAIN
from service.bench.random_checkpoint import save_random_checkpoint
from service.bench.workloads import FIRST_ID
from service.process.switch_interval import shorten_switch_interval

LEAST_RATIO: Final = 0.7
"""What keys should reach of the rate of plain sockets."""
PAGE, ROWS, MARGIN = 16, 4, 64
"""Tokens of a page, requests at once, and tokens of room behind a prompt."""
ASKED: Final = 5
"""Requests of a round, each way."""


@dataclass(frozen=True, slots=True)
class FirstTokens:
    """Seconds to a first token: of one engine, through two, how many more that is, and of the second leg alone.

    `asked`: requests that went through both engines, warm-up and all; `lost`: those that did not go on from keys that
    arrived. `reasons`: of failed transfers, by name.
    """

    one: float
    both: float
    added: float
    decode: float
    asked: int
    lost: int
    reasons: dict[str, int]


@click.command()
@click.option("--bytes", "nbytes", default=1 << 28, show_default=True, help="Of the keys that are sent each time.")
@click.option(
    "--prompt",
    type=click.IntRange(min=PAGE + 1),
    default=1024,
    show_default=True,
    help="Tokens before the first one that is timed; fresh ones for each request, so no prefix is cached.",
)
@click.option("--rounds", default=3, show_default=True, help="Rounds of all ways behind a warm-up; medians are told.")
@click.option("--family", default="llama", show_default=True, help="Of the model, as in bench cpu --families.")
@click.option("--dtype", default="bfloat16", show_default=True, help="Of the weights.")
@click.option("--threads", default=2, show_default=True, help="Of each engine.")
@click.option(
    "--transfer-engine", "way", type=click.Choice(list(PLAIN)), default="tcp", show_default=True, help="Of keys."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line.")
def pd(nbytes: int, prompt: int, rounds: int, family: str, dtype: str, threads: int, way: str, as_json: bool) -> None:
    """What prefill on one engine and decode on another costs on this machine.

    First, bytes per second of the keys of one prompt from a process that gives them to this one, over loopback. They
    lie in pieces of 256 KiB to 1 MiB, as in host memory that was used for a while. Beside them plain blocking sockets
    send the same bytes between the same two processes, as fast as TCP goes here; with --transfer-engine nixl, one read
    of NIXL fetches all of them. Each process has a core of its own, if there are two. The ratio should be 0.7 or more.

    Then, seconds to the first token through an engine that prefills and one that decodes, asked one after the other as
    by a gateway of vLLM's dialect. Beside them one engine that does both, and the decoding engine alone: it fetches the
    keys, computes the last page and samples. All three are in this process and share its cores, one at work at a time.

    Last, how many requests had to do without the keys: any makes the command fail.
    """
    shorten_switch_interval(writes=True)
    try:
        rates = measure_rates(nbytes, rounds, way)
    except TransferFailed as error:
        raise click.ClickException(f"keys did not arrive ({error.reason}): {error}") from None
    click.echo(f"keys of {nbytes:,} bytes, from process to process")
    click.echo(f"  {PLAIN[way].name:<22}{rates.raw / 1e9:10.3f} GB/s")
    click.echo(f"  {'giver to taker':<22}{rates.keys / 1e9:10.3f} GB/s{rates.ratio:9.3f} x, at least {LEAST_RATIO}")
    first = measure_first_tokens(prompt, rounds, family, dtype, threads, way)
    click.echo(f"first token of a prompt of {prompt:,} tokens")
    click.echo(f"  {'one engine':<22}{first.one:10.4f} s")
    click.echo(f"  {'prefill, then decode':<22}{first.both:10.4f} s{first.added:+9.4f} s added")
    click.echo(f"  {'decode alone':<22}{first.decode:10.4f} s")
    click.echo(f"keys that did not arrive: of {first.lost} of {first.asked} requests")
    if as_json:
        click.echo(json.dumps({"rates": asdict(rates), "first": asdict(first)}))
    if first.lost:
        why = ", ".join(f"{count} {reason}" for reason, count in first.reasons.items()) or "none failed on the way"
        raise click.ClickException(f"{first.lost} of {first.asked} requests did without the keys ({why})")


def measure_first_tokens(
    prompt: int, rounds: int, family: str, dtype: str, threads: int, way: str = "tcp"
) -> FirstTokens:
    """Make the model and three engines, and ask all ways in each of `rounds` rounds, behind one that warms up."""
    with tempfile.TemporaryDirectory() as name:
        context = prompt + MARGIN
        shape = FAMILY_SHAPES[family] | {"model_type": family, "max_position_embeddings": context}
        save_random_checkpoint(shape, getattr(torch, dtype), Path(name))
        return asyncio.run(_first_tokens(name, prompt, rounds, dtype, threads, way))


async def _first_tokens(name: str, prompt: int, rounds: int, dtype: str, threads: int, way: str) -> FirstTokens:
    async with AsyncExitStack() as stack:
        engines = []
        for role in ("both", "prefill", "decode"):
            built = build_engine(
                EngineConfig(
                    model=ModelConfig(name, dtype=dtype, native="wait"),
                    memory=MemoryConfig(PAGE, ROWS, ROWS * (prompt + MARGIN)),
                    scheduler=SchedulerConfig(),
                    executor=ExecutorConfig(device="cpu", cpu_threads=threads),
                    disagg=DisaggConfig(role=role, transfer_engine=way),
                )
            )
            engines.append(await built.start())
            stack.push_async_callback(engines[-1].stop)
        plain, prefill, decode = engines
        found = [await _round(plain, prefill, decode, prompt, random.Random(number)) for number in range(rounds + 1)]
        transfers = decode.stats.transfers
    assert transfers is not None, "it decodes for others"
    one, both, second = (median(each) for each in zip(*found[1:]))
    added = median(each[1] - each[0] for each in found[1:])
    asked = ASKED * len(found)
    reasons = {reason: count for reason, count in transfers.failures.items() if count}
    return FirstTokens(one, both, added, second, asked, asked - transfers.taken, reasons)


async def _round(
    plain: AsyncEngine, prefill: AsyncEngine, decode: AsyncEngine, prompt: int, pick: random.Random
) -> tuple[float, float, float]:
    """Median seconds to a first token of one engine, through both, and of the second of these alone."""
    found = []
    for _ in range(ASKED):
        alone, shared = _ids(pick, prompt), _ids(pick, prompt)
        one = await _first_token(plain, alone)
        began = time.perf_counter()
        handed = await _prefilled(prefill, shared)
        before = time.perf_counter() - began
        source = TakeOver(handed.host, handed.port, handed.room, handed.engine_id)
        second = await _first_token(decode, shared, source)
        found.append((one, before + second, second))
    one, both, second = (median(each) for each in zip(*found))
    return one, both, second


async def _first_token(engine: AsyncEngine, prompt: tuple[int, ...], source: TakeOver | None = None) -> float:
    """Seconds to the first token of two."""
    sampling = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    began, first = time.perf_counter(), 0.0
    async for event in await engine.generate(
        GenerateRequest(token_ids=prompt, sampling=sampling, want_text=False, take_over=source)
    ):
        if isinstance(event, Delta):
            first = first or time.perf_counter() - began
    return first


async def _prefilled(engine: AsyncEngine, prompt: tuple[int, ...]) -> Handed:
    """Where the keys of `prompt` are, when `engine` has ended with it."""
    sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    handed = None
    async for event in await engine.generate(
        GenerateRequest(token_ids=prompt, sampling=sampling, want_text=False, hand_over=HandOver())
    ):
        if isinstance(event, Finished):
            handed = event.handed
    assert handed is not None, "it was asked to keep them"
    return handed


def _ids(pick: random.Random, count: int) -> tuple[int, ...]:
    return tuple(pick.randrange(FIRST_ID, 4096) for _ in range(count))
