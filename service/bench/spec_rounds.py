"""Engines with and without drafts, by turns in one process: each does every round, and all outputs must be the same."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Protocol

from core.config import EngineConfig, ExecutorConfig, MemoryConfig, ModelConfig, SpeculationConfig
from core.engine.async_engine import AsyncEngine
from core.engine.build import build_engine
from core.types.io import Delta, Finished, GenerateRequest, Usage
from core.types.sampling_params import SamplingParams
from service.bench.spec_works import Ask, Ids, Maker, quoted, round_of


@dataclass(frozen=True, slots=True)
class Ran:
    """What became of some requests: `drafts` of these steps were verified, and `accepted` of them right."""

    outputs: tuple[Ids, ...]
    seconds: float
    drafts: int = 0
    accepted: int = 0

    @property
    def tokens(self) -> int:
        """Of all outputs."""
        return sum(map(len, self.outputs))

    @property
    def rate(self) -> float:
        """Output tokens per second."""
        return self.tokens / max(self.seconds, 1e-9)


class Runner(Protocol):
    """An engine, ours or another."""

    async def run(self, asks: Sequence[Ask], streams: int, scope: str) -> Ran:
        """Serve `asks` in their order, so many at once. Text of another `scope` is of no use to them."""
        ...


class Served:
    """This engine, started, with drafts by `method` or "off"."""

    def __init__(self, model: str, method: str, dtype: str, threads: int) -> None:
        """Raises ConfigError for a method that there is none of, StartupError for one that the model cannot have."""
        config = EngineConfig(
            model=ModelConfig(model, dtype=dtype, native="wait"),
            memory=MemoryConfig(),
            executor=ExecutorConfig(device="cpu", cpu_threads=threads),
            speculation=SpeculationConfig(method=method),
        )
        self._built = build_engine(config)
        self._engine: AsyncEngine | None = None

    async def start(self) -> None:
        """Before anything is run."""
        self._engine = await self._built.start()

    async def stop(self) -> None:
        """No-op unless it was started."""
        if self._engine is not None:
            await self._engine.stop()

    async def run(self, asks: Sequence[Ask], streams: int, scope: str) -> Ran:
        """See `Runner`. Raises RuntimeError for an output of another length than was asked for."""
        assert self._engine is not None, "started"
        waiting = list(enumerate(asks))[::-1]
        ended: dict[int, tuple[Ids, Usage]] = {}

        async def stream(engine: AsyncEngine) -> None:
            while waiting:
                number, ask = waiting.pop()
                ended[number] = await _output(engine, ask, scope)

        began = time.perf_counter()
        await asyncio.gather(*(stream(self._engine) for _ in range(streams)))
        seconds = time.perf_counter() - began
        usages = [usage for _, usage in ended.values()]
        return Ran(
            tuple(ended[number][0] for number in range(len(asks))),
            seconds,
            sum(usage.draft_tokens for usage in usages),
            sum(usage.accepted_draft_tokens for usage in usages),
        )


async def _output(engine: AsyncEngine, ask: Ask, scope: str) -> tuple[Ids, Usage]:
    sampling = SamplingParams(temperature=ask.temperature, seed=ask.seed, max_tokens=ask.max_new, ignore_eos=True)
    request = GenerateRequest(token_ids=ask.prompt, sampling=sampling, want_text=False, cache_salt=scope)
    got, usage = list[int](), None
    async for event in await engine.generate(request):
        if isinstance(event, Delta):
            got += event.token_ids
        elif isinstance(event, Finished):
            usage = event.usage
    if usage is None or len(got) != ask.max_new:
        raise RuntimeError(f"{len(got)} tokens came where {ask.max_new} were asked for")
    return tuple(got), usage


@dataclass(frozen=True, slots=True)
class Cell:
    """One row of the table but for the method."""

    work: str
    streams: int
    temperature: float


@dataclass(slots=True)
class Figures:
    """What the rounds of one cell gave for one engine; `ratios` are to the first engine of the same round."""

    rates: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    tokens: int = 0
    drafts: int = 0
    accepted: int = 0
    different: int = 0
    """Outputs that are not those of the first engine."""
    outputs: int = 0
    quoted: list[float] = field(default_factory=list)

    def add(self, ran: Ran, first: Ran, asks: Sequence[Ask]) -> None:
        """One round more, in which the first engine gave `first`."""
        self.rates.append(ran.rate)
        self.ratios.append(ran.rate / first.rate)
        self.tokens += ran.tokens
        self.drafts += ran.drafts
        self.accepted += ran.accepted
        self.different += sum(one != other for one, other in zip(ran.outputs, first.outputs, strict=True))
        self.outputs += len(ran.outputs)
        self.quoted.append(quoted(asks, ran.outputs))

    @property
    def rate(self) -> float:
        """Output tokens per second, the median of rounds."""
        return median(self.rates)

    @property
    def ratio(self) -> float:
        """To the first engine: the median of the ratios of rounds."""
        return median(self.ratios)

    @property
    def length(self) -> float:
        """Tokens that a stream got from one step, on the mean of all steps, with drafts or not."""
        return self.tokens / max(self.tokens - self.accepted, 1)

    @property
    def acceptance(self) -> float:
        """The part of verified drafts that was right; 0 without any."""
        return self.accepted / max(self.drafts, 1)


async def measure(runners: dict[str, Runner], maker: Maker, cell: Cell, rounds: int) -> dict[str, Figures]:
    """Figures by runner. Each round is the same for all; they take turns, and every other round goes backwards.

    A round that does not count comes first: it lets compiled code, caches and what is known of drafts settle.
    """
    found = {name: Figures() for name in runners}
    for number in range(rounds + 1):
        work = await round_of(cell.work, maker, number, cell.streams, cell.temperature)
        scope = f"{cell.work} {cell.streams} {cell.temperature} {number}"
        order = list(runners) if number % 2 else list(runners)[::-1]
        ran: dict[str, Ran] = {}
        for name in order:
            if work.before:
                await runners[name].run(work.before, cell.streams, scope)
            ran[name] = await runners[name].run(work.asks, cell.streams, scope)
        if number:
            first = ran[next(iter(runners))]
            for name, figures in found.items():
                figures.add(ran[name], first, work.asks)
    return found
