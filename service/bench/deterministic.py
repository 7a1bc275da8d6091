"""`slipstream bench deterministic`: what `--deterministic` costs, and which requests hear of their company without it.

An engine with the setting and one without take turns in one process, round by round. What is reported is the median of
the ratios of rounds, in tokens per second of processor time, so that other work of the machine does not count. Then
each request is asked alone and among all others of its kind, of both engines, and its log probabilities are compared
bit for bit. Ends with status 1 if they differ in the engine that is deterministic.
"""

from __future__ import annotations

import asyncio
import json
import struct
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
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
from service.bench.cpu import MODELS
from service.bench.random_checkpoint import save_random_checkpoint
from service.process.switch_interval import shorten_switch_interval

SHAPES: Final[dict[str, dict[str, object]]] = {
    **MODELS,
    "windows": {
        **MODELS["tiny"],
        "model_type": "gemma3_text",
        "head_dim": 64,
        "sliding_window": 48,
        "layer_types": ["sliding_attention", "full_attention"] * 4,
    },
    "experts": {
        **MODELS["tiny"],
        "model_type": "qwen3_moe",
        "head_dim": 64,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 512,
    },
}
"""By name, what a checkpoint with random weights is made of."""
ROOM: Final = 32 * 768
"""Tokens of each engine's cache: of the most requests at once."""
CHUNK: Final = 200
"""Prompt tokens of a step. Prompts are no part of it, so that company cuts them elsewhere."""
NAMES: Final = (False, True)
"""Engines by whether they are deterministic."""


@dataclass(frozen=True, slots=True)
class Work:
    """`streams` requests at once, of `prompt` tokens each, for `outputs` more."""

    name: str
    streams: int
    prompt: int
    outputs: int

    def asks(self, number: int, vocab: int) -> list[tuple[int, ...]]:
        """The prompts of a round, other ones for each `number`."""
        draw = torch.Generator().manual_seed(number)
        return [tuple(row) for row in torch.randint(3, vocab, (self.streams, self.prompt), generator=draw).tolist()]


WORKS: Final = (
    Work("one that decodes", 1, 64, 64),
    Work("eight that decode", 8, 64, 32),
    Work("thirty-two that decode", 32, 64, 16),
    Work("prompts of 512", 4, 512, 1),
)


@dataclass(slots=True)
class Figures:
    """One work of one model. By whether the engine is deterministic: tokens per second of processor time in each round,
    and requests whose bits in company are not those that they have alone."""

    work: Work
    rates: dict[bool, list[float]] = field(default_factory=lambda: {name: [] for name in NAMES})
    differ: dict[bool, int] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """What is left of the tokens per second: the median of the ratios of rounds."""
        return median(on / off for off, on in zip(self.rates[False], self.rates[True], strict=True))


@click.command()
@click.option(
    "--models", default="tiny,windows,experts", show_default=True, help=f"Of {', '.join(SHAPES)}; or folders."
)
@click.option("--quantizations", default="none,int8", show_default=True, help="Of the weights at load.")
@click.option("--dtype", default="bfloat16", show_default=True, help="Of the weights: bfloat16 or float32.")
@click.option("--rounds", default=5, show_default=True, help="Of each engine; one more comes first and does not count.")
@click.option("--threads", default=1, show_default=True, help="Of each engine.")
@click.option("--json", "json_too", is_flag=True, help="Print one JSON object as the last line.")
def deterministic(models: str, quantizations: str, dtype: str, rounds: int, threads: int, json_too: bool) -> None:
    """Tokens a second with --deterministic and without, and whose bits depend on the batch, as Markdown.

    A second is one of processor time of all threads.
    """
    shorten_switch_interval(writes=False)
    told: list[dict[str, Any]] = []
    click.echo("| model | weights | work | tokens/s without | with | ratio | other bits in company without | with |")
    click.echo("|---|---|---|---|---|---|---|---|")
    for model in models.split(","):
        with tempfile.TemporaryDirectory(prefix="slipstream-deterministic-") as made:
            path = _checkpoint(model, Path(made), dtype)
            for quantization in quantizations.split(","):
                weights = dtype if quantization == "none" else f"{quantization}, {dtype}"
                for figures in _measured(path, dtype, quantization, rounds, threads):
                    click.echo(f"| {model} | {weights} | {_row(figures)} |")
                    told.append({"model": model, "weights": weights, "ratio": figures.ratio, **asdict(figures)})
    if json_too:
        click.echo(json.dumps(told))
    if any(each["differ"][True] for each in told):
        raise SystemExit(1)


def _row(figures: Figures) -> str:
    off, on = (median(figures.rates[name]) for name in NAMES)
    count, differ = figures.work.streams, figures.differ
    return (
        f"{figures.work.name} | {off:,.0f} | {on:,.0f} | {figures.ratio:.2f} | "
        f"{differ[False]} of {count} | {differ[True]} of {count}"
    )


def _checkpoint(model: str, made: Path, dtype: str) -> Path:
    """Where `model` is; one that is a shape is written into `made`."""
    if model not in SHAPES:
        if not Path(model).is_dir():
            raise click.BadParameter(f"{model!r} is none of {', '.join(SHAPES)}, nor a folder", param_hint="--models")
        return Path(model)
    save_random_checkpoint(SHAPES[model], getattr(torch, dtype), made)
    return made


def _measured(path: Path, dtype: str, quantization: str, rounds: int, threads: int) -> list[Figures]:
    """Figures by work. Raises StartupError for a model that cannot be deterministic."""
    built = {
        name: build_engine(
            EngineConfig(
                model=ModelConfig(str(path), dtype=dtype, quantization=quantization, native="wait", deterministic=name),
                memory=MemoryConfig(max_total_tokens=ROOM, prefix_cache="none"),
                scheduler=SchedulerConfig(chunked_prefill_size=CHUNK),
                executor=ExecutorConfig(device="cpu", cpu_threads=threads),
            )
        )
        for name in NAMES
    }

    async def run() -> list[Figures]:
        engines = {name: await each.start() for name, each in built.items()}
        try:
            return [await _figures(engines, work, rounds) for work in WORKS]
        finally:
            for engine in engines.values():
                await engine.stop()

    return asyncio.run(run())


async def _figures(engines: dict[bool, AsyncEngine], work: Work, rounds: int) -> Figures:
    """Rounds by turns, every other one backwards; then the bits of one round more, alone and in company."""
    found, vocab = Figures(work), engines[True].model_info.vocab_size
    for number in range(rounds + 1):
        for name in NAMES if number % 2 else NAMES[::-1]:
            prompts, began = work.asks(number, vocab), time.process_time()
            await asyncio.gather(*(_bits(engines[name], prompt, work.outputs, told=False) for prompt in prompts))
            if number:
                tokens = work.streams * (work.outputs if work.outputs > 1 else work.prompt)
                found.rates[name].append(tokens / (time.process_time() - began))
    prompts = work.asks(rounds + 1, vocab)
    for name, engine in engines.items():
        alone = [await _bits(engine, prompt, work.outputs) for prompt in prompts]
        company = await asyncio.gather(*(_bits(engine, prompt, work.outputs) for prompt in prompts))
        found.differ[name] = sum(one != other for one, other in zip(alone, company, strict=True))
    return found


async def _bits(engine: AsyncEngine, prompt: Sequence[int], outputs: int, *, told: bool = True) -> bytes:
    """Tokens of a greedy answer, and the log probabilities of each if they are to be `told`, as bits."""
    sampling = SamplingParams(
        temperature=0.0, max_tokens=outputs, ignore_eos=True, logprobs=told, top_logprobs=4 * told
    )
    got = b""
    request = GenerateRequest(token_ids=tuple(prompt), sampling=sampling, want_text=False)
    async for event in await engine.generate(request):
        if isinstance(event, Delta):
            # Token by token: how many of them come at once is no part of an answer.
            for each in event.logprobs:
                got += struct.pack(f"q{1 + len(each.top)}d", each.token_id, each.logprob, *(top for _, top in each.top))
    return got
