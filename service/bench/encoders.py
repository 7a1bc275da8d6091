"""`slipstream bench encoders`: texts per second that are embedded and judged, sentence-transformers beside it.

An engine and a process of the peer take turns, round by round, with the same threads and texts; one round of each comes
first and does not count. Embedding and judging are of the same shape with random weights. What is reported is the
median of the ratios of rounds.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

import click
import torch

from core.config import EngineConfig, ExecutorConfig, ModelConfig
from core.engine.async_engine import AsyncEngine
from core.engine.build import build_engine
from core.machine import usable_cpus
from core.types.io import EmbedRequest, Pooling, TextPair
from service.bench.encoder_works import SHAPES, USUAL, Text, chosen, pairs_to_judge, save_encoder, texts_to_embed
from service.bench.spec_peers import end
from service.process.switch_interval import shorten_switch_interval

SCRIPT: Final = Path(__file__).with_name("encoder_peer.py")
PER_CALL: Final = 64
"""Texts of one request; a client with more asks for them at once."""


@dataclass(slots=True)
class Figures:
    """Texts per second of each round, of one work of one model."""

    model: str
    dtype: str
    work: str
    ours: list[float] = field(default_factory=list)
    peer: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """Ours as a multiple of the peer's: the median of the ratios of rounds."""
        return median(ours / peer for ours, peer in zip(self.ours, self.peer, strict=True))


@click.command()
@click.option("--models", default=",".join(USUAL), show_default=True, help=f"Of {', '.join(SHAPES)}.")
@click.option("--dtypes", default="float32", show_default=True, help="Of the weights: float32, bfloat16, with commas.")
@click.option("--rounds", default=3, show_default=True, help="Of each; one more comes first and does not count.")
@click.option("--threads", type=int, help="Of each.  [default: all cores]")
@click.option("--peer-python", default=sys.executable, help="An interpreter that may have sentence-transformers.")
@click.option("--json", "json_too", is_flag=True, help="Print one JSON object as the last line.")
def encoders(models: str, dtypes: str, rounds: int, threads: int | None, peer_python: str, json_too: bool) -> None:
    """Texts a second that are embedded, and pairs that are judged, as Markdown. The peer is sentence-transformers where
    --peer-python has it, else transformers as that uses it: padded batches of 32, in the order of their lengths.

    \b
    slipstream bench encoders
    slipstream bench encoders --models minilm --dtypes float32,bfloat16 --peer-python ~/st/bin/python
    """
    try:
        names = chosen(models)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--models") from None
    # As `slipstream serve` has it where it writes to the clients itself.
    shorten_switch_interval(writes=True)
    count = threads or usable_cpus()
    click.echo("| model | dtype | work | texts/s | peer's | ours, times |\n|---|---|---|---|---|---|")
    found: list[Figures] = []
    for name in names:
        for dtype in dtypes.split(","):
            for judges in (False, True):
                for each in _measured(name, dtype, judges, rounds, count, peer_python):
                    found.append(each)
                    click.echo(_line(each))
    if json_too:
        click.echo(json.dumps([asdict(each) | {"ratio": each.ratio} for each in found]))


def _line(found: Figures) -> str:
    rates = f"{median(found.ours):,.1f} | {median(found.peer):,.1f} | {found.ratio:.2f}"
    return f"| {found.model} | {found.dtype} | {found.work} | {rates} |"


def _measured(name: str, dtype: str, judges: bool, rounds: int, threads: int, python: str) -> list[Figures]:
    works = pairs_to_judge() if judges else texts_to_embed()
    with tempfile.TemporaryDirectory(prefix="slipstream-encoders-") as folder:
        save_encoder(SHAPES[name], getattr(torch, dtype), Path(folder), judges=judges)
        with _peer(python, folder, dtype, threads, judges) as peer:
            return asyncio.run(_rounds(name, dtype, judges, rounds, threads, folder, works, peer))


async def _rounds(
    name: str,
    dtype: str,
    judges: bool,
    rounds: int,
    threads: int,
    directory: str,
    works: Mapping[str, Sequence[Text]],
    peer: subprocess.Popen[str],
) -> list[Figures]:
    found = [Figures(name, dtype, work) for work in works]
    async with _engine(directory, dtype, threads) as engine:
        for number in range(rounds + 1):
            for figures in found:
                texts = works[figures.work]
                ours = len(texts) / await _seconds(engine, texts, judges)
                theirs = len(texts) / await asyncio.to_thread(_asked, peer, texts)
                turn = f"round {number} of {rounds}" if number else "warm-up"
                click.echo(f"  {name}, {figures.work}, {turn}: {ours:,.1f} beside {theirs:,.1f}", err=True)
                if number:
                    figures.ours.append(ours)
                    figures.peer.append(theirs)
    return found


@asynccontextmanager
async def _engine(directory: str, dtype: str, threads: int) -> AsyncIterator[AsyncEngine]:
    config = EngineConfig(
        model=ModelConfig(directory, dtype=dtype, native="wait"),
        executor=ExecutorConfig(device="cpu", cpu_threads=threads),
    )
    engine = await build_engine(config).start()
    try:
        yield engine
    finally:
        await engine.stop()


async def _seconds(engine: AsyncEngine, texts: Sequence[Text], judges: bool) -> float:
    """How long one client waits for all of them."""
    inputs = [TextPair(*each) if isinstance(each, tuple) else each for each in texts]
    pooling = Pooling.LABELS if judges else Pooling.MEAN
    began = time.perf_counter()
    await asyncio.gather(
        *(_call(engine, inputs[at : at + PER_CALL], pooling) for at in range(0, len(inputs), PER_CALL))
    )
    return time.perf_counter() - began


async def _call(engine: AsyncEngine, inputs: Sequence[Any], pooling: Pooling) -> None:
    async with aclosing(await engine.embed(EmbedRequest(tuple(inputs), pooling=pooling))) as call:
        await call.result()


@contextmanager
def _peer(python: str, directory: str, dtype: str, threads: int, judges: bool) -> Iterator[subprocess.Popen[str]]:
    """The process of the peer, which has loaded its model. Raises ClickException where it could not."""
    command = [python, str(SCRIPT), directory, dtype, str(threads), "judge" if judges else "embed"]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert process.stdin is not None and process.stdout is not None
            name = process.stdout.readline().strip()
            if not name:
                log.seek(0)
                raise click.ClickException(f"the peer could not start: {(log.read().strip() or '?').splitlines()[-1]}")
            click.echo(f"  the peer is {name}", err=True)
            yield process
        finally:
            end(process)


def _asked(peer: subprocess.Popen[str], texts: Sequence[Text]) -> float:
    """The seconds that the peer took for `texts`."""
    assert peer.stdin is not None and peer.stdout is not None
    peer.stdin.write(json.dumps(texts) + "\n")
    peer.stdin.flush()
    answer = peer.stdout.readline()
    if not answer:
        raise click.ClickException("the peer ended before it answered")
    return float(answer)
