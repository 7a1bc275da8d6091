"""`slipstream bench gpu`: decode against the memory roofline, idle time, prefill, mixed steps, and transformers.

Everything that the documents say about a GPU comes from this command. `--device cpu --shape tiny` runs every line of it
in seconds, and shows nothing about speed. It needs PyTorch, transformers and click, and nothing that serves.

Devices may be lent by the minute: each part has a budget, and the file of `--out` is written after each figure.
"""

from __future__ import annotations

import asyncio
import datetime
import gc
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cached_property
from itertools import product
from typing import Any

import click
import torch

from core.config import EngineConfig, ExecutorConfig, MemoryConfig, ModelConfig, SchedulerConfig
from core.device.streams import DeviceStreams, resolve_device
from core.engine.async_engine import AsyncEngine
from core.engine.build import assemble
from core.engine.built_engine import BuiltEngine
from core.engine.random_model import as_model, let_go, random_module
from core.memory.kv_pool import KVPool
from core.models.base import Model
from core.models.bundled import bundled_model_dir
from core.text.tokenizer import Tokenizer
from service.bench.decode_load import CHUNK, Load, watch_decode, watch_first_token, watch_transformers
from service.bench.gpu_shapes import DTYPES, SHAPES
from service.bench.kept_figures import Budget, keep
from service.bench.mixed_load import MixedLoad, config_of, loads_of, measure_mixed, told
from service.bench.roofline import Demands, Peaks, measure_peaks
from service.process.switch_interval import shorten_switch_interval

PAGE = 16
POOL_SHARE = 0.85
"""Share of the memory that is free after the weights; the rest is for activations and graphs."""
PARTS = ("all", "own", "mixed", "peer")
PEER_SHARE = 0.5
"""Share of the budget after which transformers begins no load: the engine is measured beside it in the other half."""
CPU_POOL = 64 << 20
"""Bytes that count as free on a CPU, where the command is only tried."""


class Bench:
    """One model on one device, and the figures that were taken of it. `tell` gets all of them after each."""

    def __init__(
        self,
        device: torch.device,
        shape: str,
        loads: list[Load],
        attention: str,
        budget: Budget,
        tell: Callable[[dict[str, Any]], object],
    ) -> None:
        self.device, self.loads = device, loads
        self._shape, self._attention, self._budget, self._tell = shape, attention, budget, tell
        self._context = max(load.context + load.lengths()[0] for load in loads) + 2 * PAGE
        self.peaks = measure_peaks(device, DTYPES[shape])
        self.module = random_module(SHAPES[shape], DTYPES[shape], device)
        self.beside: dict[str, Any] = {}
        self.rows: list[dict[str, Any]] = []
        self.prefill: list[dict[str, Any]] = []
        self.mixed: list[dict[str, Any]] = []

    def run_transformers(self) -> None:
        """Run the loads on transformers. Call it first, while the module is as transformers made it.

        A load that fails, or that does not fit into the device or the time, is recorded as failed.
        """
        for load in self.loads:
            self.module.config._attn_implementation = "sdpa"
            try:
                if not self._budget.allows(PEER_SHARE):
                    raise RuntimeError(self._budget.refusal())
                if load.tokens > self._room(self._kv_bytes()):
                    raise RuntimeError("does not fit")
                self.beside[_name(load)] = asdict(watch_transformers(self.module, load, PAGE))
            except Exception as error:
                # One load that fails must not end the run, and with it the figures of the others.
                self.beside[_name(load)] = {"failed": f"{type(error).__name__}: {error}"}
            finally:
                self.module.config._attn_implementation = "eager"
            self._took(f"transformers {_name(load)}: {self.beside[_name(load)]}")
            _forget()

    def run_engine(self, overlaps: tuple[bool, ...], prompts: bool) -> None:
        """Run the loads on an engine for each of `overlaps`, over the same weights and pools of one size.

        The first measures single `prompts` before.
        """
        for overlap in overlaps:
            self._run_engine(overlap, prompts and overlap is overlaps[0])
            self._end_engine()

    def run_mixed(self, loads: Sequence[MixedLoad], overlaps: tuple[bool, ...] = (True, False)) -> None:
        """Run prompts beside rows that decode, in steps replayed and launched: their time, and what they dispatch."""
        room = self._room(self._kv_bytes())
        for overlap, captured in product(overlaps, (True, False)):
            executor = ExecutorConfig(
                self.device.type, overlap=overlap, attention_backend=self._attention, cuda_graphs=captured
            )
            for load in loads:
                if load.tokens > room:
                    self._took_mixed(executor, load, {"left_out": _too_large(load.tokens, room)})
            fit = [load for load in loads if load.tokens <= room]
            # What is dispatched hardly depends on how many rows there are.
            self._run_mixed(fit if overlap else fit[-1:], executor)

    def result(self) -> dict[str, Any]:
        """What was measured so far."""
        cuda = self.device.type == "cuda"
        return {
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "device": torch.cuda.get_device_name(self.device) if cuda else "cpu",
            "torch": torch.__version__,
            "shape": self._shape,
            "dtype": str(DTYPES[self._shape]).removeprefix("torch."),
            "peaks": asdict(self.peaks),
            "decode": self.rows,
            "prefill": self.prefill,
            "mixed": self.mixed,
            "transformers": self.beside,
        }

    def _took(self, line: str) -> None:
        _say(line)
        self._tell(self.result())

    @cached_property
    def _model(self) -> Model:
        """The module as engines run it; as transformers made it, it runs no more."""
        return as_model(self.module)

    def _end_engine(self) -> None:
        let_go(self._model, self.device)
        _forget()

    def _run_engine(self, overlap: bool, prompts: bool) -> None:
        """Run all loads, single `prompts` first; record by name those that do not fit."""
        spec = self._model.spec
        demands = Demands.of(self.module, KVPool.bytes_per_token_for(spec.kv_layers, spec.dtype))
        room = self._room(demands.kv_bytes_per_token)
        built = self._built(overlap, room)
        asyncio.run(self._watch(built, demands, overlap, prompts, room))

    async def _watch(self, built: BuiltEngine, demands: Demands, overlap: bool, prompts: bool, room: int) -> None:
        engine = await built.start()
        try:
            for load in {load.context: load for load in self.loads if prompts}.values():
                if self._budget.allows():
                    await self._first_token(engine, load, demands)
            for load in self.loads:
                await self._decode(engine, load, demands, overlap, room)
        finally:
            await engine.stop()

    async def _first_token(self, engine: AsyncEngine, load: Load, demands: Demands) -> None:
        prompt = load.prompts()[0]
        # Once without the clock, to warm up.
        await watch_first_token(engine, prompt)
        seconds = min([await watch_first_token(engine, prompt) for _ in range(3)])
        share = demands.prefill_flops(load.context) / seconds / self.peaks.flops_per_second
        self.prefill.append(
            {"context": load.context, "ttft_ms": round(seconds * 1000, 2), "matmul_share": round(share, 4)}
        )
        self._took(f"prefill {self.prefill[-1]}")

    async def _decode(self, engine: AsyncEngine, load: Load, demands: Demands, overlap: bool, room: int) -> None:
        row: dict[str, Any] = {"batch": load.batch, "context": load.context, "overlap": overlap}
        if load.tokens > room:
            row["left_out"] = _too_large(load.tokens, room)
        elif not self._budget.allows():
            row["left_out"] = self._budget.refusal()
        else:
            figures = await watch_decode(engine, load)
            needed = demands.decode_bytes(load.batch, load.mean_context) / self.peaks.roof
            row |= asdict(figures) | {"roofline": round(needed / (figures.step_ms / 1000), 4)}
        self.rows.append(row)
        self._took(str(row))

    def _built(self, overlap: bool, room: int) -> BuiltEngine:
        rows = max(load.batch for load in self.loads)
        config = EngineConfig(
            model=ModelConfig("random", context_length=self._context),
            memory=MemoryConfig(PAGE, rows, min(room, rows * self._context), prefix_cache="none"),
            scheduler=SchedulerConfig(chunked_prefill_size=CHUNK, max_queued_requests=rows),
            executor=ExecutorConfig(device=self.device.type, overlap=overlap, attention_backend=self._attention),
        )
        return self._assembled(config)

    def _run_mixed(self, loads: Sequence[MixedLoad], executor: ExecutorConfig) -> None:
        """Run `loads`, all of which fit, on an engine with this `executor`."""
        if not self._budget.allows():
            for load in loads:
                self._took_mixed(executor, load, {"left_out": self._budget.refusal()})
        elif loads:
            asyncio.run(self._watch_mixed(self._assembled(config_of(loads, executor, PAGE)), loads))
            self._end_engine()

    async def _watch_mixed(self, built: BuiltEngine, loads: Sequence[MixedLoad]) -> None:
        executor = built.config.executor
        engine = await built.start()
        try:
            for load in loads:
                figures = await measure_mixed(engine, load, counts=not executor.overlap)
                self._took_mixed(executor, load, asdict(figures))
        finally:
            await engine.stop()

    def _took_mixed(self, executor: ExecutorConfig, load: MixedLoad, figures: dict[str, Any]) -> None:
        way = {"overlap": executor.overlap, "cuda_graphs": executor.cuda_graphs}
        self.mixed.append(way | {"batch": load.batch, "chunk": load.chunk} | figures)
        self._took(f"mixed {self.mixed[-1]}")

    def _assembled(self, config: EngineConfig) -> BuiltEngine:
        return assemble(config, self._model, Tokenizer.load(str(bundled_model_dir())), DeviceStreams(self.device))

    def _kv_bytes(self) -> int:
        """Bytes of KV that one token takes in all layers."""
        config = self.module.config
        width = config.hidden_size // config.num_attention_heads
        size: int = self.module.dtype.itemsize
        return 2 * int(config.num_hidden_layers * config.num_key_value_heads * width) * size

    def _room(self, bytes_per_token: int) -> int:
        """Tokens of KV that the device holds beside the weights."""
        free = torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else CPU_POOL
        return int(free * POOL_SHARE) // bytes_per_token // PAGE * PAGE


def _name(load: Load) -> str:
    return f"{load.batch}x{load.context}"


def _too_large(tokens: int, room: int) -> str:
    """What is said of a load that does not fit."""
    return f"needs {tokens} tokens of KV, the device has room for {room}"


def _say(line: str) -> None:
    click.echo(line, err=True)


def _forget() -> None:
    """Give back the memory that the last run left, so that the next one finds it free."""
    gc.unfreeze()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


@click.command()
@click.option("--device", default="cuda", show_default=True, help="cuda, or cpu to try the command itself.")
@click.option("--shape", type=click.Choice(list(SHAPES)), default="8b", show_default=True, help="Shape of the model.")
@click.option("--batches", default="1,8,64,256", show_default=True, help="Requests that decode at once.")
@click.option("--contexts", default="1024,8192", show_default=True, help="Prompt tokens of each.")
@click.option("--steps", default=128, show_default=True, help="Decode steps that are watched.")
@click.option("--chunk", default=256, show_default=True, help="Prompt tokens of each mixed step.")
@click.option("--attention", default="auto", show_default=True, help="Attention backend.")
@click.option(
    "--part",
    type=click.Choice(PARTS),
    default="all",
    show_default=True,
    help="own: prefill, and decode with overlap and without. mixed: prompts beside decoding rows. peer: transformers.",
)
@click.option("--budget", default=420.0, show_default=True, help="Seconds after which no figure is begun.")
@click.option(
    "--out", type=click.Path(dir_okay=False), help="Also write the JSON object to this file, after each figure."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line.")
def gpu(
    device: str,
    shape: str,
    batches: str,
    contexts: str,
    steps: int,
    chunk: int,
    attention: str,
    part: str,
    budget: float,
    out: str | None,
    as_json: bool,
) -> None:
    """Decode and prefill of a model with random weights on a GPU, as shares of what the GPU can do."""
    shorten_switch_interval(writes=False)
    target = resolve_device(device)
    vocab = SHAPES[shape]["vocab_size"]
    loads = [Load(batch, context, steps, vocab) for context in _numbers(contexts) for batch in _numbers(batches)]
    tell: Callable[[dict[str, Any]], object] = (lambda found: keep(found, out)) if out else lambda _: None
    bench = Bench(target, shape, loads, attention, Budget(budget), tell)
    if part in ("all", "peer"):
        bench.run_transformers()
    if part != "mixed":
        bench.run_engine((True,) if part == "peer" else (True, False), prompts=part != "peer")
    if part in ("all", "mixed"):
        bench.run_mixed(loads_of(_numbers(batches), chunk, steps, vocab))
    result = bench.result()
    _report(result, bench.peaks)
    if as_json:
        click.echo(json.dumps(result))


def _report(result: dict[str, Any], peaks: Peaks) -> None:
    click.echo(f"{result['date']}  {result['device']}  torch {result['torch']}  {result['shape']} {result['dtype']}")
    stated = peaks.stated_bytes_per_second
    click.echo(
        f"memory {peaks.bytes_per_second / 1e12:.2f} TB/s copied, {'-' if stated is None else f'{stated / 1e12:.2f}'} "
        f"stated; matmul {peaks.flops_per_second / 1e12:.1f} TFLOP/s"
    )
    click.echo("batch  context  overlap  tokens/s  step ms  roofline    idle  transformers tokens/s")
    for row in result["decode"]:
        head = f"{row['batch']:5}  {row['context']:7}  {'on ' if row['overlap'] else 'off':>7}"
        other = result["transformers"].get(f"{row['batch']}x{row['context']}", {})
        theirs = other.get("tokens_per_second", math.nan)
        if "left_out" in row:
            click.echo(f"{head}  {row['left_out']}")
        else:
            click.echo(
                f"{head}  {row['tokens_per_second']:8.0f}  {row['step_ms']:7.2f}  {row['roofline']:8.1%}  "
                f"{row['idle_share']:6.2%}  {theirs:.0f}"
            )
    for row in result["prefill"]:
        click.echo(
            f"prompt of {row['context']} alone: first token after {row['ttft_ms']:.1f} ms, "
            f"{row['matmul_share']:.1%} of the matmul peak"
        )
    for row in result["mixed"]:
        click.echo(told(row))
    for name, other in result["transformers"].items():
        if "failed" in other:
            click.echo(f"transformers {name}: {other['failed']}")
