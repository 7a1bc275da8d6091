"""`slipstream bench overlap`: does the device wait for the scheduler, and what does the scheduler cost?"""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import asdict, dataclass

import click
import numpy as np
import torch

from core.config import EngineConfig, ExecutorConfig, GrammarConfig, MemoryConfig, ModelConfig, SchedulerConfig
from core.engine.async_engine import AsyncEngine
from core.engine.build import assemble
from core.engine.built_engine import BuiltEngine
from core.models.bundled import bundled_model_dir
from core.text.tokenizer import Tokenizer
from core.types.io import Delta
from core.types.sampling_params import SamplingParams
from service.bench.asserts import ROUNDS, STEPS, check_costs, check_figures
from service.bench.emulated import EmulatedModel, EmulatedStreams, Timeline, expected_output
from service.bench.features import FEATURES, PLAIN, Feature
from service.bench.scheduler_cost import scheduler_cost
from service.process.switch_interval import shorten_switch_interval

PROMPT_TOKENS = 16


@dataclass(frozen=True, slots=True)
class OverlapFigures:
    """The figures of one run, while all requests decode.

    `idle_share`: share of time in which the device was idle. `step_ms`: from one step's start to the next one's.
    `lead_ms`: the work that the device still had when its next step came (median), the reserve for a late step.
    """

    idle_share: float
    step_ms: float
    steps: int
    tokens_per_second: float
    wrong_tokens: int
    lead_ms: float = 0.0


async def measure_overlap(
    *, overlap: bool, requests: int, step_ms: float, tokens: int, feature: Feature = PLAIN
) -> OverlapFigures:
    """Decode `requests` sequences of `tokens` tokens each in process, on an emulated device.

    Every token is checked if `feature.is_checked`. With n outputs per request, `requests` / n requests are sent.
    """
    timeline = Timeline(step_ms / 1000)
    built, vocab = _built(timeline, overlap, requests, tokens, feature)
    engine = await built.start()
    rng = random.Random(0)
    prompts = [[rng.randrange(vocab) for _ in range(PROMPT_TOKENS)] for _ in range(requests // feature.n)]
    everyone = asyncio.Barrier(len(prompts) + 1)
    readers = [asyncio.create_task(_read(engine, prompt, tokens, everyone, feature)) for prompt in prompts]
    await everyone.wait()
    timeline.reset()
    began = time.monotonic()
    await asyncio.wait(readers, return_when=asyncio.FIRST_COMPLETED)
    elapsed = time.monotonic() - began
    steps, idle_share, lead = timeline.steps, timeline.idle_share, float(np.median(timeline.leads))
    outputs = await asyncio.gather(*readers)
    await engine.stop()
    pairs = zip(prompts, outputs, strict=True)
    wrong = sum(_wrong(p, out, tokens, vocab) for p, outs in pairs for out in outs) if feature.is_checked else 0
    return OverlapFigures(
        idle_share=round(idle_share, 5),
        step_ms=round(elapsed / steps * 1000, 3),
        steps=steps,
        tokens_per_second=round(steps * requests / elapsed, 1),
        wrong_tokens=wrong,
        lead_ms=round(lead * 1000, 2),
    )


def _built(timeline: Timeline, overlap: bool, requests: int, tokens: int, feature: Feature) -> tuple[BuiltEngine, int]:
    tokenizer = Tokenizer.load(str(bundled_model_dir()))
    context = PROMPT_TOKENS + tokens + 1
    model = EmulatedModel(timeline, tokenizer.vocab_size, context)
    config = EngineConfig(
        model=ModelConfig("emulated"),
        memory=MemoryConfig(max_running_requests=requests, max_total_tokens=requests * (context + 16)),
        scheduler=SchedulerConfig(chunked_prefill_size=requests * PROMPT_TOKENS, max_queued_requests=requests),
        executor=ExecutorConfig(device="cpu", overlap=overlap),
        grammar=GrammarConfig(backend=feature.grammar_backend),
    )
    return assemble(config, model, tokenizer, EmulatedStreams(timeline)), tokenizer.vocab_size


async def _read(
    engine: AsyncEngine, prompt: list[int], tokens: int, everyone: asyncio.Barrier, feature: Feature
) -> list[list[int]]:
    """Read all outputs of one request to their ends; after its first token wait for those of the other requests."""
    request = feature.request(prompt, SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True))
    got: list[list[int]] = [[] for _ in range(feature.n)]
    started = False
    async for event in await engine.generate(request):
        if isinstance(event, Delta):
            got[event.index].extend(event.token_ids)
            if not started:
                started = True
                await everyone.wait()
    return got


def _wrong(prompt: list[int], output: list[int], tokens: int, vocab: int) -> int:
    """How many tokens of `output` are not those of the emulated model."""
    return sum(a != b for a, b in zip(output, expected_output(prompt, tokens, vocab), strict=True))


@click.command()
@click.option(
    "--step-ms",
    type=click.FloatRange(min=0),
    default=5.0,
    show_default=True,
    help="How long one step holds the emulated device; 0 for the pace of the host alone.",
)
@click.option("--requests", default=256, show_default=True, help="Requests that decode at the same time.")
@click.option("--steps", default=400, show_default=True, help="Decode steps per round.")
@click.option(
    "--rounds", default=3, show_default=True, help="Rounds of each kind, interleaved; the median is reported."
)
@click.option(
    "--with",
    "features",
    metavar="NAMES",
    default="",
    help=f"Also with each of these, by commas: {', '.join(FEATURES)}.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line.")
def overlap(step_ms: float, requests: int, steps: int, rounds: int, features: str, as_json: bool) -> None:
    """Idle share of an emulated device, with overlap on and off, the scheduler's own cost, and that of device checks.

    The real scheduler, forward thread and relay run against a device that only passes time: a step occupies it for
    --step-ms. Idle is what a real device would have waited for the host.
    """
    shorten_switch_interval(writes=False)
    torch.set_num_threads(1)
    runs: dict[bool, list[OverlapFigures]] = {True: [], False: []}
    for number in range(rounds):
        for kind, figures in runs.items():
            figures.append(asyncio.run(measure_overlap(overlap=kind, requests=requests, step_ms=step_ms, tokens=steps)))
            name = "on " if kind else "off"
            click.echo(f"round {number + 1}/{rounds}  overlap {name}  {_line(figures[-1])}", err=True)
    beside = _with_features(features, requests, step_ms, steps, rounds)
    medians = {kind: sorted(figures, key=lambda f: f.idle_share)[len(figures) // 2] for kind, figures in runs.items()}
    costs = {running: scheduler_cost(running) for running in (1, 64, 256, 1024)}
    # Steps of no time take what the host does.
    share_of = step_ms or medians[True].step_ms
    checks = check_figures(check_costs(requests, torch.device("cpu"), STEPS, ROUNDS), share_of / 1000)
    _report(medians, costs, requests, step_ms)
    for name, figure in beside.items():
        click.echo(f"  with {name:10}  {_line(figure)}")
    click.echo(f"\ndevice checks of one step of {requests} rows, share of a step of {share_of:g} ms over OFF")
    for mode in ("count", "trap"):
        click.echo(
            f"  {mode.upper():5}  {checks[f'{mode}_us'] - checks['off_us']:8.1f} µs  {checks[f'{mode}_percent']:6.2f} %"
        )
    if as_json:
        click.echo(
            json.dumps(
                {
                    "overlap_on": asdict(medians[True]),
                    "overlap_off": asdict(medians[False]),
                    "with": {name: asdict(figure) for name, figure in beside.items()},
                    "scheduler_us_per_step": {str(running): round(cost * 1e6, 1) for running, cost in costs.items()},
                    "device_checks": checks,
                }
            )
        )


def _with_features(names: str, requests: int, step_ms: float, steps: int, rounds: int) -> dict[str, OverlapFigures]:
    """Medians of overlapped runs with each of the features named."""
    found = {}
    for name in filter(None, names.split(",")):
        if name not in FEATURES:
            raise click.BadParameter(f"{name!r} is none of {', '.join(FEATURES)}", param_hint="--with")
        runs = []
        for number in range(rounds):
            feature = FEATURES[name]
            run = measure_overlap(overlap=True, requests=requests, step_ms=step_ms, tokens=steps, feature=feature)
            runs.append(asyncio.run(run))
            click.echo(f"round {number + 1}/{rounds}  with {name}  {_line(runs[-1])}", err=True)
        found[name] = sorted(runs, key=lambda run: run.idle_share)[len(runs) // 2]
    return found


def _line(figures: OverlapFigures) -> str:
    speed = f"step {figures.step_ms:.2f} ms  {figures.tokens_per_second:,.0f} tokens/s"
    return f"idle {figures.idle_share:7.2%}  lead {figures.lead_ms:.1f} ms  {speed}"


def _report(medians: dict[bool, OverlapFigures], costs: dict[int, float], requests: int, step_ms: float) -> None:
    click.echo(f"\n{requests} requests, {step_ms:g} ms steps, medians")
    click.echo(f"  overlap on   {_line(medians[True])}")
    click.echo(f"  overlap off  {_line(medians[False])}")
    click.echo("\nscheduler's own cost of one decode step (plan, submit, take results; no device, no clients)")
    for running, cost in costs.items():
        click.echo(f"  {running:5d} running  {cost * 1e6:8.1f} µs  {cost * 1e6 / running:6.2f} µs per request")
