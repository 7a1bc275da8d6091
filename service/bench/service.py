"""`slipstream bench service`: what the way from the engine to gRPC clients costs, beside raw grpc.aio."""

from __future__ import annotations

import asyncio
import json
import statistics
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import click
import torch

from core.config import EngineConfig, ExecutorConfig, MemoryConfig, ModelConfig, SchedulerConfig
from core.engine.build import assemble
from core.models.bundled import bundled_model_dir
from core.text.tokenizer import Tokenizer
from core.types.io import Delta, GenerateRequest
from core.types.sampling_params import SamplingParams
from service.bench.emulated import EmulatedModel, EmulatedStreams, Timeline
from service.bench.raw_stream import LOCK_STEP_METHOD, RAW_METHOD, RawServer
from service.bench.stream_client import GENERATE_METHOD, Job, StreamClient
from service.bench.stream_rate import Latencies, Rate, Stream, measure_latencies, measure_rate
from service.cli.lifecycle import Served
from service.config.server_config import ServerConfig
from service.frontends.group import FrontEndGroup
from service.process.switch_interval import shorten_switch_interval
from service.server.server import Server

PROMPT_TOKENS = 16
W2_PROMPT, W2_TOKENS, W2_REQUESTS = 128, 128, 6
LATENCY_KINDS = ("in_process", "grpc", "raw")
LEAST_TOKENS, MOST_TOKENS = 150, 1000
"""Fewest and most tokens of one stream."""

OPENING_STEP_SECONDS = 0.1
"""Seconds of a step while streams are being opened."""
PACED_STEPS = 120
"""Most tokens of each stream of a paced run: its rate is that of the steps, for which few tokens are enough."""


@dataclass(slots=True)
class Width:
    """Rates of one number of streams, a value per round.

    `raw`: the ceiling of grpc.aio. `lock_step`: the same with tokens that come in steps from another thread. `engine`
    and `flat_out`: the engine alone and the whole server, with a device that takes no time. `paced_in_process` and
    `paced`: these two with a device that takes time.
    """

    raw: list[Rate] = field(default_factory=list)
    lock_step: list[Rate] = field(default_factory=list)
    engine: list[Rate] = field(default_factory=list)
    flat_out: list[Rate] = field(default_factory=list)
    paced_in_process: list[Rate] = field(default_factory=list)
    paced: list[Rate] = field(default_factory=list)

    def figures(self) -> dict[str, float]:
        """Medians. Shares are medians of the shares within a round, since rounds differ more than kinds do."""
        shares = [_share(ours, raw) for ours, raw in zip(self.flat_out, self.raw)]
        of_both = [max(_share(*both[:2]), _share(*both[::2])) for both in zip(self.flat_out, self.raw, self.engine)]
        in_step = [_share(ours, raw) for ours, raw in zip(self.flat_out, self.lock_step)]
        kept = [_share(served, alone) for served, alone in zip(self.paced, self.paced_in_process)]
        return {
            "raw_tokens_per_second": _median_tokens(self.raw),
            "lock_step_tokens_per_second": _median_tokens(self.lock_step),
            "engine_tokens_per_second": _median_tokens(self.engine),
            "tokens_per_second": _median_tokens(self.flat_out),
            "tokens_per_message": statistics.median(r.tokens_per_second / r.messages_per_second for r in self.flat_out),
            "share_of_raw": statistics.median(shares),
            "share_of_lock_step": statistics.median(in_step),
            "share_of_the_slower": statistics.median(of_both),
            "paced_in_process_tokens_per_second": _median_tokens(self.paced_in_process),
            "paced_tokens_per_second": _median_tokens(self.paced),
            "speed_kept": statistics.median(kept),
        }


@dataclass(slots=True)
class OneAtATime:
    """Latencies of requests one after the other: in the engine's process, over gRPC, and from the raw server."""

    in_process: Latencies = field(default_factory=Latencies)
    grpc: Latencies = field(default_factory=Latencies)
    raw: Latencies = field(default_factory=Latencies)


def _share(of: Rate, whole: Rate) -> float:
    return of.tokens_per_second / whole.tokens_per_second


def _median_tokens(rates: list[Rate]) -> float:
    return statistics.median(rate.tokens_per_second for rate in rates)


class Bench:
    """A server over the emulated device in this process, the raw server beside it, the client in another process."""

    def __init__(self, server: Served, timeline: Timeline, raw: RawServer, client: StreamClient) -> None:
        self._server, self._timeline, self._raw, self._client = server, timeline, raw, client

    async def width(self, into: Width, streams: int, tokens: int, step_ms: float) -> None:
        """Measure one round of every kind of rate."""
        raw = Job(self._raw.port, RAW_METHOD, streams, tokens, PROMPT_TOKENS)
        self._raw.expect(streams)
        ours = Job(self._server.port, GENERATE_METHOD, streams, tokens, PROMPT_TOKENS)
        into.raw.append(await self._client.rate(raw))
        into.lock_step.append(await self._client.rate(replace(raw, method=LOCK_STEP_METHOD)))
        few = min(tokens, PACED_STEPS)
        for seconds, count, here, there in (
            (0.0, tokens, into.engine, into.flat_out),
            (step_ms / 1000, few, into.paced_in_process, into.paced),
        ):
            alone = measure_rate(self._in_process(PROMPT_TOKENS, count), streams, count)
            here.append(await self._once_open(streams, seconds, alone))
            served = self._client.rate(replace(ours, tokens=count))
            there.append(await self._once_open(streams, seconds, served))

    async def latencies(self, into: OneAtATime, step_ms: float) -> None:
        """Measure one request at a time: in process, through gRPC, and from the raw server, as fast as it writes."""
        self._timeline.step_seconds = step_ms / 1000
        self._raw.expect(1)
        ours = Job(self._server.port, GENERATE_METHOD, W2_REQUESTS, W2_TOKENS, W2_PROMPT, one_by_one=True)
        into.in_process.extend(await measure_latencies(self._in_process(W2_PROMPT, W2_TOKENS), W2_REQUESTS))
        into.grpc.extend(await self._client.latencies(ours))
        into.raw.extend(await self._client.latencies(replace(ours, port=self._raw.port, method=RAW_METHOD)))

    async def _once_open(self, streams: int, step_seconds: float, measured: Coroutine[Any, Any, Rate]) -> Rate:
        """Await `measured`, with steps of `step_seconds` from the moment at which all streams run.

        With short steps from the start, the first streams would end before the last were opened.
        """
        self._timeline.step_seconds = OPENING_STEP_SECONDS
        running = asyncio.create_task(measured)
        while self._server.engine.stats.running < streams:
            if (await asyncio.wait({running}, timeout=OPENING_STEP_SECONDS / 20))[0]:
                break
        self._timeline.step_seconds = step_seconds
        return await running

    def _in_process(self, prompt: int, tokens: int) -> Stream:
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        request = GenerateRequest(token_ids=tuple(range(3, 3 + prompt)), sampling=sampling)

        async def read() -> AsyncIterator[int]:
            async for event in await self._server.engine.generate(request):
                if isinstance(event, Delta):
                    yield len(event.token_ids)

        return read


@asynccontextmanager
async def benched(rows: int, tokens: int, frontends: int = 0) -> AsyncIterator[Bench]:
    """A `Bench` with everything started, and closed at the end. No prefix is reused, so all rounds do the same."""
    tokenizer, timeline = Tokenizer.load(str(bundled_model_dir())), Timeline(0.0)
    context = max(PROMPT_TOKENS + tokens, W2_PROMPT + W2_TOKENS) + 1
    config = EngineConfig(
        model=ModelConfig("emulated"),
        memory=MemoryConfig(max_running_requests=rows, max_total_tokens=rows * (context + 16), prefix_cache="none"),
        scheduler=SchedulerConfig(chunked_prefill_size=rows * PROMPT_TOKENS, max_queued_requests=rows),
        executor=ExecutorConfig(device="cpu"),
    )
    model = EmulatedModel(timeline, tokenizer.vocab_size, context)
    built = assemble(config, model, tokenizer, EmulatedStreams(timeline))
    settings = ServerConfig.of(port=0, metrics_port=0, max_running_requests=rows, frontends=frontends)
    server: Served = (FrontEndGroup if frontends else Server)(settings, lambda *_: built)
    raw = RawServer()
    await server.listen()
    await server.load()
    await raw.start()
    try:
        async with StreamClient() as client:
            yield Bench(server, timeline, raw, client)
    finally:
        await raw.close()
        await server.close(grace=0)


async def measure(
    streams: list[int], tokens: int, rounds: int, step_ms: float, latency_step_ms: float, frontends: int = 0
) -> dict[str, Any]:
    """Measure all figures, after a first round that is not counted. `tokens`: of all streams of a run together."""
    each = {count: min(max(LEAST_TOKENS, tokens // count), MOST_TOKENS) for count in streams}
    widths = {count: Width() for count in streams}
    latencies = OneAtATime()
    async with benched(max(streams), max(each.values()), frontends) as bench:
        await bench.width(Width(), min(16, max(streams)), LEAST_TOKENS, step_ms)
        await bench.latencies(OneAtATime(), latency_step_ms)
        for number in range(rounds):
            for count, width in widths.items():
                await bench.width(width, count, each[count], step_ms)
                click.echo(f"round {number + 1}/{rounds}  {_line(count, _last(width).figures())}", err=True)
            await bench.latencies(latencies, latency_step_ms)
    return {
        "step_ms": step_ms,
        "frontends": frontends,
        "streams": {str(count): _rounded(width.figures()) for count, width in widths.items()},
        "one_at_a_time": {
            "step_ms": latency_step_ms,
            **{name: _latency_figures(getattr(latencies, name)) for name in LATENCY_KINDS},
        },
    }


def _last(width: Width) -> Width:
    return Width(*([getattr(width, name)[-1]] for name in asdict(width)))


def _rounded(figures: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in figures.items()}


def _latency_figures(seen: Latencies) -> dict[str, float]:
    """Percentiles of the latencies, in milliseconds."""
    figures: dict[str, float] = {}
    for name, values in (("ttft", seen.first), ("itl", seen.gaps)):
        cuts = statistics.quantiles(values, n=100, method="inclusive")
        figures |= {f"{name}_p{percent}_ms": cuts[percent - 1] * 1000 for percent in (50, 90, 99)}
    return _rounded(figures)


def _line(count: int, figures: dict[str, float]) -> str:
    rates = {
        name: figures[f"{key}tokens_per_second"]
        for name, key in {"raw": "raw_", "in lock step": "lock_step_", "engine alone": "engine_", "ours": ""}.items()
    }
    shares = f"{figures['share_of_raw']:.0%} of raw, {figures['share_of_lock_step']:.0%} in lock step"
    paced, alone = figures["paced_tokens_per_second"], figures["paced_in_process_tokens_per_second"]
    return (
        f"{count:4d} streams  {'  '.join(f'{name} {rate:8,.0f}' for name, rate in rates.items())} tokens/s "
        f"({shares}, {figures['share_of_the_slower']:.0%} of the slower, {figures['tokens_per_message']:.1f} a message)"
        f"  paced {paced:8,.0f} of {alone:8,.0f} ({figures['speed_kept']:.1%})"
    )


@click.command()
@click.option("--streams", default="1,16,128,256", show_default=True, help="Numbers of streams, with commas.")
@click.option("--tokens", default=60_000, show_default=True, help="Tokens of one run, all streams together.")
@click.option("--rounds", default=3, show_default=True, help="Interleaved rounds; medians are reported.")
@click.option("--step-ms", default=20.0, show_default=True, help="Step of the paced runs.")
@click.option("--latency-step-ms", default=2.5, show_default=True, help="Step of the runs with one request at a time.")
@click.option("--frontends", default=0, show_default=True, help="Front-end processes, as with `slipstream serve`.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line.")
def service(
    streams: str,
    tokens: int,
    rounds: int,
    step_ms: float,
    latency_step_ms: float,
    frontends: int,
    as_json: bool,
) -> None:
    """Tokens that reach gRPC clients per second, against raw grpc.aio in the same rounds.

    The whole path serves an emulated device that only passes time; the client is a process of its own. "raw" is a
    servicer that does nothing but write the same message per token, "in lock step" one that gets its tokens from
    another thread, the next when all streams have written theirs. "engine alone" (read in the same process) and "ours"
    have a device that takes no time; the slower of raw and engine bounds ours. "paced" compares the engine's
    speed through gRPC with that of readers in the same process. Last comes the latency of one request at a time, of
    128 tokens after 128, both ways, and beside it that of the raw server, whose tokens come as fast as they go.
    """
    counts = [int(each) for each in streams.split(",")]
    shorten_switch_interval(writes=not frontends)
    torch.set_num_threads(1)
    figures = asyncio.run(measure(counts, tokens, rounds, step_ms, latency_step_ms, frontends))
    click.echo("\nmedians")
    for count in counts:
        click.echo(_line(count, figures["streams"][str(count)]))
    click.echo(f"one at a time, {W2_PROMPT}+{W2_TOKENS} tokens, steps of {latency_step_ms:g} ms")
    for name in LATENCY_KINDS:
        values = "  ".join(f"{key} {value:.2f}" for key, value in figures["one_at_a_time"][name].items())
        click.echo(f"  {name:10}  {values}")
    if as_json:
        click.echo(json.dumps(figures))
