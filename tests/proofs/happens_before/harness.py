"""Plays a scenario through the production scheduler and step, over lazy streams or plainly, and collects what came out.

The engine is put together by `core.engine.build` as always; only model, streams and executor come from here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from core.config import EngineConfig, ExecutorConfig, MemoryConfig, ModelConfig, SchedulerConfig
from core.device.staging import Staging
from core.device.streams import DeviceStreams
from core.engine.build import assemble
from core.engine.built_engine import BuiltEngine
from core.engine.speculation import Speculation
from core.executor.interface import Executor
from core.executor.step import StepRunner
from core.models.base import Model
from core.models.bundled import bundled_model_dir
from core.sampling import sampler
from core.scheduler.outputs import Ending, StepOutputs
from core.scheduler.scheduler import Scheduler
from core.text.tokenizer import Tokenizer
from core.types.arrays import Ints
from core.types.grammar import Grammar
from core.types.io import FinishReason
from core.types.request import Req
from core.types.sampling_params import SamplingParams
from core.types.stats import EngineStats
from tests.proofs.happens_before.clocks import Race, VectorClocks
from tests.proofs.happens_before.hash_model import HashModel
from tests.proofs.happens_before.lazy_ops import forget_memory, name_memory, tell_no_more_of
from tests.proofs.happens_before.lazy_streams import LazyStreams
from tests.proofs.happens_before.seeded_executor import SeededExecutor

VOCAB, CONTEXT, PAGE = 97, 64, 4
STEP_LIMIT = 4000


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: `at` is the step before which it arrives, `abort_after` the outputs after which it is given up."""

    prompt: Sequence[int]
    tokens: int = 6
    at: int = 0
    abort_after: int | None = None
    n: int = 1
    sampling: dict[str, Any] = field(default_factory=dict)
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True)
class Scenario:
    """Requests, and the sizes that bring about what is to be seen."""

    asks: Sequence[Ask]
    rows: int = 4
    pages: int = 40
    chunk: int = 16
    cache: str = "radix"
    assert_mode: str = "count"
    window_tokens: int | None = None
    """Size of the window pool, for models that have one."""
    host_bytes: int = 0
    """Room for keys and values in host memory."""
    host_chunk: int = 256
    """Tokens of the pieces in which prefixes are kept there."""

    def config(self) -> EngineConfig:
        return EngineConfig(
            model=ModelConfig("hash"),
            memory=MemoryConfig(
                PAGE,
                self.rows,
                self.pages * PAGE,
                self.cache,
                max_window_tokens=self.window_tokens,
                host_cache_bytes=self.host_bytes,
                host_cache_chunk=self.host_chunk,
            ),
            scheduler=SchedulerConfig(chunked_prefill_size=self.chunk),
            executor=ExecutorConfig(device="cpu", overlap=False, assert_mode=self.assert_mode),
        )


@dataclass(slots=True)
class Outcome:
    """What the clients saw, output by output in the order of `Scenario.asks`, and what happened on the way."""

    tokens: list[list[int]]
    logprobs: list[list[float]]
    stats: EngineStats = field(default_factory=EngineStats)
    kinds: set[str] = field(default_factory=set)
    races: list[Race] = field(default_factory=list)
    story: str = ""
    accesses: int = 0
    failure: Exception | None = None
    """What ended the run early, if anything did."""

    def same_streams(self, other: Outcome, scenario: Scenario, within: float = 0.0) -> bool:
        """Equal outputs; one that was given up may have come further in one run than in the other.

        within: how far log probabilities may differ, of devices whose exponentials do.
        """
        given_up = [ask.abort_after for ask in scenario.asks for _ in range(ask.n)]
        logprobs = [[pytest.approx(each, rel=0, abs=within) for each in line] for line in other.logprobs]
        pairs = [*zip(given_up, self.tokens, other.tokens), *zip(given_up, self.logprobs, logprobs)]
        return all(_agree(mine, theirs, cut) for cut, mine, theirs in pairs)


def _agree(mine: list[Any], theirs: list[Any], cut: int | None) -> bool:
    shared = len(mine) if cut is None else min(len(mine), len(theirs))
    return mine[:shared] == theirs[:shared] and (cut is not None or len(mine) == len(theirs))


@cache
def tokenizer() -> Tokenizer:
    """Any will do: requests come as ids."""
    return Tokenizer.load(str(bundled_model_dir()))


def play_plainly(scenario: Scenario, model: Model | None = None) -> Outcome:
    """The oracle: nothing overlaps and nothing is late."""
    built = _assembled(scenario, model, DeviceStreams(torch.device("cpu")))
    return _Play(scenario, built, built.new_executor(_nobody)).run()


def play_lazily(
    scenario: Scenario,
    seed: int,
    model: Model | None = None,
    *,
    eagerness: float | None = None,
    speculation: Speculation | None = None,
) -> Outcome:
    """Overlapped, on lazy streams, with the recorder on; legal disorder and interleaving follow `seed`.

    `eagerness` 0 stalls the device: it runs nothing before somebody waits for it.
    """
    clocks = VectorClocks()
    streams = LazyStreams(seed, clocks, eagerness)
    with pytest.MonkeyPatch.context() as patch:
        record_staging(patch, clocks)
        with streams.on_default():
            built, runner = _build(scenario, model, streams, speculation)
        _name_state(runner)
        # On the CPU the sampler looks at values on the host; what is played here is an accelerator, which cannot.
        patch.setattr(sampler, "draw_rows", runner._state.sampler._draw_by_bisection)
        outcome = _play(scenario, built, SeededExecutor(runner, clocks, seed, streams.lazy), clocks)
    forget_memory()
    outcome.story = f"seed {seed}: {outcome.failure}\n{outcome.story}"
    return outcome


def play_on(scenario: Scenario, streams: DeviceStreams, clocks: VectorClocks, seed: int, model: Model) -> Outcome:
    """Overlapped, on a real device; only the interleaving of the threads follows `seed`."""
    built, runner = _build(scenario, model, streams)
    return _play(scenario, built, SeededExecutor(runner, clocks, seed, None), clocks)


def _play(scenario: Scenario, built: BuiltEngine, executor: SeededExecutor, clocks: VectorClocks) -> Outcome:
    play = _Play(scenario, built, executor)
    try:
        play.run()
    except Exception as error:
        play.outcome.failure = error
    outcome = play.outcome
    outcome.kinds, outcome.races = executor.kinds, clocks.races
    outcome.story, outcome.accesses = clocks.story(), clocks.accesses
    return outcome


def record_staging(patch: pytest.MonkeyPatch, clocks: VectorClocks) -> None:
    """Whoever fills a pinned buffer writes it. Buffers are kept, so that an address never means two of them."""
    plain, kept = Staging.pinned, []

    def pinned(self: Staging, ids: Sequence[Ints]) -> torch.Tensor:
        buffer = plain(self, ids)
        kept.append(buffer)
        clocks.wrote("staging", (buffer.data_ptr(),))
        return buffer

    patch.setattr(Staging, "pinned", pinned)


def _assembled(
    scenario: Scenario, model: Model | None, streams: DeviceStreams, speculation: Speculation | None = None
) -> BuiltEngine:
    return assemble(scenario.config(), model or HashModel(VOCAB, CONTEXT), tokenizer(), streams, speculation)


def _build(
    scenario: Scenario, model: Model | None, streams: DeviceStreams, speculation: Speculation | None = None
) -> tuple[BuiltEngine, StepRunner]:
    """An engine that is not started, and the runner that its own executor would drive."""
    built = _assembled(scenario, model, streams, speculation)
    inline: Any = built.new_executor(_nobody)
    return built, inline._runner


def _name_state(runner: StepRunner) -> None:
    state = runner._state
    named = {"page table": state.pool.table, "assert counters": state.checks.counters}
    named |= {name: state.future_map.buffer(name) for name in ("output_tokens_buf", "new_seq_lens_buf")}
    for name, tensor in named.items():
        name_memory(tensor, name)
    if state.host is not None:
        # Copies run beside steps: which slots and blocks are touched decides.
        for tensor in (*state.kv_pool.tensors, state.host._bytes):
            tell_no_more_of(tensor)
        # Its slots are poison here; the clocks know them from the table.
        state.kv_pool.recorder = None


def _nobody() -> None:
    """There is no loop to wake."""


class _Play:
    """One run of a scenario; time is a number of steps."""

    def __init__(self, scenario: Scenario, built: BuiltEngine, executor: Executor) -> None:
        self._scenario = scenario
        self._scheduler: Scheduler = built.new_scheduler(executor, self._emit)
        self._reqs = [(ask, req) for i, ask in enumerate(scenario.asks) for req in _reqs(i, ask)]
        self._place = {req: place for place, (_, req) in enumerate(self._reqs)}
        self.outcome = Outcome([[] for _ in self._reqs], [[] for _ in self._reqs])

    def run(self) -> Outcome:
        """To the last terminal; rows and pages are all back afterwards."""
        scheduler, step = self._scheduler, 0
        waiting = sorted(self._reqs, key=lambda pair: pair[0].at)
        # A copy may be under way when all have ended.
        while waiting or scheduler.has_work or len(scheduler.memory.leases):
            while waiting and waiting[0][0].at <= step:
                scheduler.intake.add(waiting.pop(0)[1])
            scheduler.step(float(step))
            step += 1
            assert step < STEP_LIMIT, "no end in sight"
        scheduler.memory.check_integrity()
        assert all(pool.used == 0 for pool in scheduler.memory.stats())
        self.outcome.stats = scheduler.stats
        return self.outcome

    def _emit(self, outputs: StepOutputs, now: float) -> None:
        for step in outputs.tokens:
            for i, (req, token) in enumerate(zip(step.reqs, step.tokens, strict=True)):
                place = self._place[req]
                seen = self.outcome.tokens[place]
                seen.append(token)
                if req.params.logprobs:
                    assert step.logprobs is not None
                    self.outcome.logprobs[place].append(float(step.logprobs.values[step.logprob_rows[i]]))
                if len(seen) == self._reqs[place][0].abort_after:
                    self._scheduler.intake.end(Ending(req, reason=FinishReason.CANCELLED))
        for ended in outputs.ended:
            assert ended.error is None, ended.error


def _reqs(number: int, ask: Ask) -> list[Req]:
    params = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, **ask.sampling})
    prompt = np.asarray(ask.prompt, np.int64)
    return [
        Req(f"r{number}", index, prompt, params, 1000 * number + index, ask.tokens, grammar=ask.grammar)
        for index in range(ask.n)
    ]
