"""What `slipstream bench growth` varies: one function per axis, each giving the curves of its table."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from service.bench.curve import Curve
from service.bench.features import FEATURES, PLAIN
from service.bench.growth_engine import Shape, paces
from service.bench.growth_models import MIB, SIZES, build_checkpoint, start
from service.bench.service import Width, benched

CACHES = "the objects of so many streams no longer fit the processor's own caches, so each costs more to touch"
LOGITS = "an array of logits of this size no longer fits the processor's own caches, and is read from memory"
ATTENTION = "every token attends to all before it, so a prompt costs its length squared and a step its context"

STREAM_TOKENS = 8_000
"""Tokens of all streams of a run together."""
REAL = {"hidden_size": 64, "num_hidden_layers": 2}
"""Shape of the real model, a Llama."""
REAL_REQUESTS = 4
REAL_CONTEXT = 8192
"""Longest context, in tokens, at which the real model is measured."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis. `measure(sizes, rounds, scratch)` returns its curves; `scratch` is a directory for checkpoints."""

    title: str
    size: str
    sizes: tuple[int, ...]
    measure: Callable[[Sequence[int], int, Path], list[Curve]]


def _running(sizes: Sequence[int], rounds: int, scratch: Path) -> list[Curve]:
    host = Curve("host time", "µs/step", 1.0, CACHES)
    each = Curve("host time, each", "µs/step/request", 0.0, CACHES)
    rate = Curve("throughput", "tokens/s", 1.0)
    for size in sizes:
        _say(f"{size} running")
        seen = paces(Shape(size, tokens=64), rounds)["plain"]
        host.points[size], each.points[size] = seen.step * 1e6, seen.step * 1e6 / size
        rate.points[size] = seen.tokens_per_second
    return [host, each, rate]


def _context(sizes: Sequence[int], rounds: int, scratch: Path) -> list[Curve]:
    host = Curve("host time, 16 requests", "µs/step", 0.0)
    rate = Curve("throughput, 16 requests", "tokens/s", 0.0)
    real = Curve(f"real model, {REAL_REQUESTS} requests", "µs/step", 1.0, ATTENTION)
    build_checkpoint(scratch / "context", **REAL)
    for size in sizes:
        _say(f"context of {size}")
        seen = paces(Shape(16, prompt=size, tokens=64, chunk=16 * size), rounds)["plain"]
        host.points[size], rate.points[size] = seen.step * 1e6, seen.tokens_per_second
        if size <= REAL_CONTEXT:
            shape = Shape(REAL_REQUESTS, size, 32, 0, str(scratch / "context"), REAL_REQUESTS * size)
            real.points[size] = paces(shape, 1)["plain"].step * 1e6
    return [host, rate, real]


def _prompt(sizes: Sequence[int], rounds: int, scratch: Path) -> list[Curve]:
    host = Curve("host time up to the first token", "ms", 1.0)
    real = Curve("real model, up to the first token", "ms", 2.0, ATTENTION)
    build_checkpoint(scratch / "prompt", **REAL)
    for size in sizes:
        _say(f"prompt of {size}")
        host.points[size] = paces(Shape(1, prompt=size, tokens=24), rounds)["plain"].prefill * 1e3
        if size <= 16_384:
            shape = Shape(1, prompt=size, tokens=8, checkpoint=str(scratch / "prompt"))
            real.points[size] = paces(shape, 1)["plain"].prefill * 1e3
    return [host, real]


def _vocabulary(sizes: Sequence[int], rounds: int, scratch: Path) -> list[Curve]:
    features = {"plain": PLAIN, **FEATURES}
    curves = {name: Curve(f"{name}, 16 requests", "µs/step", 1.0, LOGITS) for name in features}
    real = Curve(f"real model, {REAL_REQUESTS} requests", "µs/step", 1.0, LOGITS)
    for size in sizes:
        _say(f"vocabulary of {size}")
        for name, seen in paces(Shape(16, vocab=size, tokens=32), rounds, features).items():
            curves[name].points[size] = seen.step * 1e6
        path = scratch / f"vocab-{size}"
        build_checkpoint(path, size, **REAL)
        shape = Shape(REAL_REQUESTS, tokens=24, checkpoint=str(path))
        real.points[size] = paces(shape, rounds)["plain"].step * 1e6
    return [*curves.values(), real]


def _streams(sizes: Sequence[int], rounds: int, scratch: Path) -> list[Curve]:
    """Streams over gRPC, read by a client in its own process. Times are wall times: both share the machine."""
    cost = Curve("gRPC, wall time", "µs/token", 0.0, CACHES)
    rate = Curve("gRPC", "tokens/s", 1.0)
    engine = Curve("engine alone, read in process", "tokens/s", 1.0)
    raw = Curve("raw grpc.aio", "tokens/s", 1.0)
    tokens = {size: max(150, STREAM_TOKENS // size) for size in sizes}

    async def run() -> None:
        async with benched(max(sizes), max(tokens.values())) as bench:
            await bench.width(Width(), min(16, max(sizes)), 150, 1.0)
            for size in sizes:
                _say(f"{size} streams")
                width = Width()
                for _ in range(rounds):
                    await bench.width(width, size, tokens[size], 1.0)
                found = width.figures()
                rate.points[size] = found["tokens_per_second"]
                cost.points[size] = 1e6 / rate.points[size]
                engine.points[size], raw.points[size] = (
                    found["engine_tokens_per_second"],
                    found["raw_tokens_per_second"],
                )

    asyncio.run(run())
    return [cost, rate, engine, raw]


def _models(sizes: Sequence[int], rounds: int, scratch: Path) -> list[Curve]:
    parameters = Curve("parameters", "millions", 1.0)
    imports, load = Curve("imports", "s", 0.0), Curve("load, self-check, ready", "s", 1.0)
    first = Curve("first token of 16", "ms", 1.0)
    weights, peak = Curve("weights", "MiB", 1.0), Curve("most memory", "MiB", 1.0)
    beside = Curve("most memory, less imports", "MiB", 1.0)
    for size in sizes:
        _say(f"model of {size} million parameters")
        path = scratch / f"model-{size}"
        count = build_checkpoint(path, **SIZES[size])
        # The first start is not counted: it brings the files into the system's cache, where the others find them.
        runs = [start(path) for _ in range(max(2, rounds))][1:]
        parameters.points[size], weights.points[size] = count / 1e6, count * 4 / MIB
        imports.points[size] = statistics.median(run.imports for run in runs)
        load.points[size] = statistics.median(run.load for run in runs)
        first.points[size] = statistics.median(run.first_token for run in runs) * 1e3
        peak.points[size] = statistics.median(run.peak_rss for run in runs) / MIB
        beside.points[size] = statistics.median(run.peak_rss - run.imports_rss for run in runs) / MIB
    return [parameters, imports, load, first, weights, peak, beside]


def _say(what: str) -> None:
    click.echo(f"{what} ...", err=True)


AXES: dict[str, Axis] = {
    "running": Axis("Running requests", "running requests", (1, 16, 64, 256, 512, 1024), _running),
    "context": Axis("Context", "tokens of context", (512, 2048, 8192, 32_768), _context),
    "prompt": Axis("Prompt", "tokens of the prompt", (1024, 4096, 16_384, 65_536), _prompt),
    "vocabulary": Axis("Vocabulary", "tokens known", (2048, 8192, 32_768, 131_072), _vocabulary),
    "streams": Axis("Streams through gRPC", "streams", (1, 16, 64, 256), _streams),
    "models": Axis("Start-up and memory", "million parameters", tuple(SIZES), _models),
}
"""By the name that `--axes` takes."""
