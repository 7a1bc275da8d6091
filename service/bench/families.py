"""`slipstream bench cpu --families`: every family of the support table beside `transformers`, and vLLM where it is.

Engines of one family are kept and take turns, round by round; a round that does not count comes first. Rows are printed
as they are done, since all of them take hours; each rate is told on standard error as it comes.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

import click
import torch

from service.bench.family_shapes import CONTEXT, FAMILY_SHAPES
from service.bench.kept_contender import EngineFailed, Kept, KeptContender, KeptPeer
from service.bench.random_checkpoint import save_random_checkpoint
from service.bench.spec_peers import ForeignEngine, PeerFailed, is_installed

OURS: Final = ("slipstream", "transformers")
PEER: Final = "vLLM"
MOST_STREAMS: Final = 64
"""Requests at once in the widest workload."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured. `loads`: names of workloads; `peer_python`: an interpreter that may have vLLM."""

    families: Sequence[str]
    loads: Sequence[str]
    dtypes: Sequence[str]
    rounds: int
    threads: int
    peer_python: str


@dataclass(frozen=True, slots=True)
class Row:
    """Medians of rounds, output tokens per second by engine and workload. `failed`: by engine, why it has none."""

    family: str
    dtype: str
    rates: dict[str, dict[str, float]]
    failed: dict[str, str]


def measure_families(plan: Plan) -> list[Row]:
    """Measure and print one row after the other, as Markdown. Raises ClickException for a family without a shape."""
    for family in plan.families:
        if family not in FAMILY_SHAPES:
            known = ", ".join(FAMILY_SHAPES)
            raise click.BadParameter(f"{family!r} is none of {known}", param_hint="--models")
    has_peer = is_installed(plan.peer_python, PEER)
    if not has_peer:
        click.echo(f"{PEER} is not installed for {plan.peer_python}: rows are without it (--peer-python)", err=True)
    click.echo(_header(plan.loads))
    rows = []
    for family in plan.families:
        for dtype in plan.dtypes:
            with tempfile.TemporaryDirectory(prefix="slipstream-families-") as folder:
                click.echo(f"{family}, {dtype}: making a checkpoint", err=True)
                row = _measure(family, dtype, plan, Path(folder), has_peer)
            for line in _lines(row, plan.loads):
                click.echo(line)
            rows.append(row)
    return rows


def _measure(family: str, dtype: str, plan: Plan, folder: Path, has_peer: bool) -> Row:
    directory = folder / "model"
    module = save_random_checkpoint(FAMILY_SHAPES[family] | {"model_type": family}, getattr(torch, dtype), directory)
    vocab_size: int = module.config.vocab_size
    del module  # or it would stay beside those of the engines
    kept, failed = dict[str, Kept](), dict[str, str]()
    rates: dict[str, dict[str, list[float]]] = {}
    try:
        for name in OURS:
            task = {"contender": name, "dtype": dtype, "quantization": "none", "threads": plan.threads}
            kept[name] = KeptContender(str(directory), task, folder / f"{name}.log")
        if has_peer:
            try:
                kept[PEER] = _peer(str(directory), dtype, plan, folder, vocab_size)
            except PeerFailed as error:
                failed[PEER] = _reason(error)
        for name, load, rate in _rounds(kept, plan, failed):
            rates.setdefault(name, {}).setdefault(load, []).append(rate)
    finally:
        for engine in kept.values():
            engine.close()
    medians = {name: {load: median(found) for load, found in loads.items()} for name, loads in rates.items()}
    return Row(family, dtype, medians, failed)


def _peer(directory: str, dtype: str, plan: Plan, folder: Path, vocab_size: int) -> KeptPeer:
    engine = ForeignEngine(
        *(plan.peer_python, PEER, directory, 0, dtype, plan.threads, folder / "peer"),
        context=CONTEXT,
        streams=MOST_STREAMS,
    )
    return KeptPeer(engine, vocab_size)


def _rounds(kept: dict[str, Kept], plan: Plan, failed: dict[str, str]) -> Iterator[tuple[str, str, float]]:
    """(engine, workload, tokens per second) of rounds that count. An engine that fails is left out from then on."""
    for number in range(plan.rounds + 1):
        for load in plan.loads:
            for name, engine in kept.items():
                if name in failed:
                    continue
                try:
                    rate = engine.rate(load, number)
                except (EngineFailed, PeerFailed) as error:
                    failed[name] = _reason(error)
                    continue
                turn = f"round {number} of {plan.rounds}" if number else "warm-up"
                click.echo(f"  {turn}, {load}: {name} {rate:,.1f} tokens/s", err=True)
                if number:
                    yield name, load, rate


def _reason(error: Exception) -> str:
    """The last line of what an engine printed."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:200] if lines else "it said nothing"


def _header(loads: Sequence[str]) -> str:
    names = ["family", "dtype", "engine", *loads, *(f"ours, {load}" for load in loads)]
    return f"| {' | '.join(names)} |\n|{'---|' * len(names)}"


def _lines(row: Row, loads: Sequence[str]) -> Iterator[str]:
    """A line of the table for each engine. The last columns are our rates as multiples of its rates."""
    ours = row.rates.get(OURS[0], {})
    for name, rates in row.rates.items():
        found = [f"{rates[load]:,.1f}" if load in rates else "" for load in loads]
        times = [
            "" if name == OURS[0] or load not in rates or load not in ours else f"{ours[load] / rates[load]:.2f}"
            for load in loads
        ]
        yield f"| {row.family} | {row.dtype} | {name} | {' | '.join([*found, *times])} |"
    for name, reason in row.failed.items():
        yield f"| {row.family} | {row.dtype} | {name} | {reason.replace('|', ' ')} |" + " |" * (2 * len(loads) - 1)


def as_json(rows: Sequence[Row]) -> str:
    """All figures as one JSON object."""
    return json.dumps([{"family": r.family, "dtype": r.dtype, "rates": r.rates, "failed": r.failed} for r in rows])
