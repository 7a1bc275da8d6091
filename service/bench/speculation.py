"""`slipstream bench speculation`: tokens per second with drafts and without, and that outputs are the same.

Engines with and without drafts take turns in one process, round by round; what is reported is the median of the ratios
of rounds. Ends with status 1 if an output differs.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch

from core.config import SPECULATIVE
from core.errors import ConfigError, StartupError
from core.models.bundled import bundled_model_dir
from core.text.tokenizer import Tokenizer
from service.bench.cpu import MODELS
from service.bench.spec_peers import MODULES, NOT_INSTALLED, ForeignEngine, PeerFailed, is_installed
from service.bench.spec_rounds import Cell, Figures, Runner, Served, measure
from service.bench.spec_works import WORKS, Ask, Ids, Maker
from service.process.switch_interval import shorten_switch_interval

METHODS = tuple(method for method in SPECULATIVE if method not in ("off", "auto") and ":" not in method)
"""Those that need no more than their name."""
PLAIN = "off"
PEER_DRAFTS = {"llama.cpp": (0, 2, 6)}
"""Most tokens of another engine's drafts: none, as many as ours has, and what its documents advise on a CPU."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What the command was asked for."""

    model: str
    methods: tuple[str, ...]
    works: tuple[str, ...]
    streams: tuple[int, ...]
    temperatures: tuple[float, ...]
    rounds: int
    dtype: str
    threads: int
    peers: tuple[str, ...] = ()
    peer_python: str = ""
    folder: Path = Path("build/bench")

    def cells(self) -> list[Cell]:
        """One for each work, temperature and number of streams."""
        return [
            Cell(work, streams, temperature)
            for work in self.works
            for temperature in WORKS[work].temperatures or self.temperatures
            for streams in self.streams
        ]


@dataclass(slots=True)
class Report:
    """Figures by cell and engine, and why some engines are not among them."""

    cells: list[tuple[Cell, dict[str, Figures]]] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)
    versions: dict[str, dict[str, Any]] = field(default_factory=dict)
    ours: tuple[str, ...] = ()
    """Engines whose outputs must be the same."""

    @property
    def different(self) -> int:
        """Outputs of our engines that are not those without drafts."""
        return sum(figures[name].different for _, figures in self.cells for name in self.ours)

    @property
    def outputs(self) -> int:
        """Outputs that were compared."""
        return sum(figures[name].outputs for _, figures in self.cells for name in self.ours[1:])


@click.command()
@click.option(
    "--model",
    default="bundled",
    show_default=True,
    help=f"A directory, bundled, or one with random weights that is made: {', '.join(MODELS)}.",
)
@click.option("--methods", default=",".join(METHODS), show_default=True, help="As --speculative, with commas.")
@click.option("--rounds", default=3, show_default=True, help="Of each engine; one more comes first and does not count.")
@click.option("--streams", default="1,4,32", show_default=True, help="Requests at once, with commas.")
@click.option(
    "--work",
    "works",
    default="",
    help=f"Of {', '.join(WORKS)}, with commas.  [default: quoting,random for random weights, else the others]",
)
@click.option(
    "--temperature", "temperatures", default="0,0.8", show_default=True, help="Of fresh and replayed, with commas."
)
@click.option("--dtype", default="bfloat16", show_default=True, help="Of the weights: bfloat16 or float32.")
@click.option("--threads", default=os.cpu_count() or 1, show_default=True, help="Of each engine.")
@click.option("--peers", is_flag=True, help=f"Also {', '.join(MODULES)} with their n-gram drafts, one greedy stream.")
@click.option("--peer-python", default="python3", show_default=True, help="The interpreter that has them.")
@click.option("--folder", default="build/bench", show_default=True, help="For checkpoints that are made or converted.")
@click.option("--json", "out", type=click.Path(dir_okay=False), help="Also write all figures to this file.")
def speculation(
    model: str,
    methods: str,
    rounds: int,
    streams: str,
    works: str,
    temperatures: str,
    dtype: str,
    threads: int,
    peers: bool,
    peer_python: str,
    folder: str,
    out: str | None,
) -> None:
    """Output tokens per second on the CPU with drafts and without, by turns in one process, as Markdown.

    fresh: stories that were never told; replayed: asked for again, with other seeds; random: what repeats nothing;
    quoting: prompts that quote themselves. Fails if an output with drafts is not the one without.
    """
    shorten_switch_interval(writes=False)
    chosen = works or ("quoting,random" if model in MODELS else "fresh,replayed,random")
    for work in chosen.split(","):
        if work not in WORKS:
            raise click.BadParameter(f"{work!r} is none of {', '.join(WORKS)}", param_hint="--work")
    plan = Plan(
        model=_checkpoint(model, dtype, Path(folder)),
        methods=tuple(filter(None, methods.split(","))),
        works=tuple(chosen.split(",")),
        streams=tuple(map(int, streams.split(","))),
        temperatures=tuple(map(float, temperatures.split(","))),
        rounds=rounds,
        dtype=dtype,
        threads=threads,
        peers=tuple(MODULES) if peers else (),
        peer_python=peer_python,
        folder=Path(folder),
    )
    report = asyncio.run(run(plan))
    click.echo(table(report))
    if out:
        Path(out).write_text(json.dumps(as_json(plan, report), indent=1) + "\n")
    if report.different:
        raise click.ClickException(f"{report.different} of {report.outputs} outputs differ from those without drafts")


def _checkpoint(model: str, dtype: str, folder: Path) -> str:
    """The directory of `model`; one with random weights is made unless it is there."""
    if model == "bundled":
        return str(bundled_model_dir())
    if model not in MODELS:
        return model
    from service.bench.random_checkpoint import save_random_checkpoint

    directory = folder / f"{model}-{dtype}"
    if not (directory / "model.safetensors").exists():
        _say(f"making {directory}")
        save_random_checkpoint(MODELS[model], getattr(torch, dtype), directory)
    return str(directory)


async def run(plan: Plan) -> Report:
    """Start all engines, measure every cell, and stop them."""
    report, engines = Report(), await _served(plan)
    ours = {name: engine for name, engine in engines.items() if isinstance(engine, Served)}
    report.ours = tuple(ours)
    report.absent = {name: reason for name, reason in engines.items() if isinstance(reason, str)}
    with ExitStack() as stack:
        try:
            foreign = _foreign(plan, report, stack)
            maker = _maker(plan, ours[PLAIN])
            for cell in plan.cells():
                _say(f"{cell.work}, {cell.streams} at once, temperature {cell.temperature:g}")
                beside = foreign if cell.streams == 1 and cell.temperature == 0.0 else {}
                report.cells.append((cell, await measure({**ours, **beside}, maker, cell, plan.rounds)))
        finally:
            for engine in ours.values():
                await engine.stop()
    return report


async def _served(plan: Plan) -> dict[str, Served | str]:
    """By method an engine, the one without drafts first; or why there is none."""
    found: dict[str, Served | str] = {}
    for method in (PLAIN, *plan.methods):
        try:
            engine = Served(plan.model, method, plan.dtype, plan.threads)
        except ConfigError as error:
            raise click.BadParameter(str(error), param_hint="--methods") from None
        except StartupError as error:
            if method == PLAIN:
                raise click.ClickException(str(error)) from None
            found[method] = str(error)
            continue
        await engine.start()
        found[method] = engine
    return found


def _foreign(plan: Plan, report: Report, stack: ExitStack) -> dict[str, Runner]:
    """Other engines without and with drafts; `stack` ends them."""
    found: dict[str, Runner] = {}
    for peer in plan.peers:
        if not is_installed(plan.peer_python, peer):
            report.absent[peer] = NOT_INSTALLED
            continue
        for drafts in PEER_DRAFTS.get(peer, (0, 6)):
            name = f"{peer}, ngram {drafts}" if drafts else f"{peer}, plain"
            _say(f"starting {name}")
            folder = plan.folder / "peers" / Path(plan.model).name
            try:
                engine = ForeignEngine(plan.peer_python, peer, plan.model, drafts, plan.dtype, plan.threads, folder)
            except PeerFailed as error:
                _say(str(error))
                report.absent[name] = "failed"
                continue
            stack.callback(engine.close)
            found[name], report.versions[name] = engine, engine.info
    return found


def _maker(plan: Plan, engine: Runner) -> Maker:
    tokenizer = Tokenizer.load(plan.model)
    vocab = json.loads((Path(plan.model) / "config.json").read_text())["vocab_size"]

    async def greedy(asks: Sequence[Ask]) -> list[Ids]:
        return list((await engine.run(asks, len(asks), "making prompts")).outputs)

    return Maker(partial(tokenizer.encode, add_special_tokens=False), vocab, greedy)


def table(report: Report) -> str:
    """The figures as Markdown."""
    heads = "work | streams | temperature | engine | tokens/s | × plain | tokens a step | drafts right | quoted"
    lines = [f"| {heads} |", "|---" * 9 + "|"]
    for cell, found in report.cells:
        for name, figures in found.items():
            foreign = name not in report.ours
            drafts = "" if foreign or name == PLAIN else f"{figures.length:.2f} | {figures.acceptance:.0%}"
            lines.append(
                f"| {cell.work} | {cell.streams} | {cell.temperature:g} | {name} | {figures.rate:,.1f} "
                f"| {figures.ratio:.2f} | {drafts or ' | '} | {max(figures.quoted):.0%} |"
            )
    lines += [f"| | | | {name} | {reason} | | | | |" for name, reason in report.absent.items()]
    same = "all outputs equal" if not report.different else f"{report.different} outputs differ"
    return "\n".join([*lines, "", f"{same}: {report.outputs} with drafts compared with those without"])


def as_json(plan: Plan, report: Report) -> dict[str, Any]:
    """All figures, with those of each round."""
    return {
        "model": plan.model,
        "dtype": plan.dtype,
        "threads": plan.threads,
        "different": report.different,
        "outputs": report.outputs,
        "absent": report.absent,
        "versions": report.versions,
        "cells": [
            asdict(cell)
            | {
                "engines": {
                    name: asdict(figures)
                    | {
                        "rate": figures.rate,
                        "ratio": figures.ratio,
                        "length": figures.length,
                        "acceptance": figures.acceptance,
                    }
                    for name, figures in found.items()
                }
            }
            for cell, found in report.cells
        ],
    }


def _say(line: str) -> None:
    click.echo(line, err=True)
