"""Steps with prompts beside rows that decode, as `slipstream bench gpu` measures them: replayed on the stand-in too."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from core.engine import build
from core.executor import mixed_graphs
from core.executor.step import StepRunner
from core.types.io import Delta, GenerateRequest
from service.bench import decode_load, mixed_load
from service.bench.decode_load import Load
from service.bench.gpu import Bench
from service.bench.kept_figures import Budget
from service.bench.mixed_load import (
    CONTEXT,
    MOST_ROWS,
    MOST_STEPS,
    MixedFigures,
    MixedLoad,
    Operations,
    loads_of,
    measure_mixed,
    told,
    watch_mixed,
)
from service.bench.roofline import Peaks
from tests.support.fakes.grid_attention import MixedAttention
from tests.support.fakes.hand_clock import by_hand
from tests.support.fakes.traced_graphs import GraphStreams, TracedGraph
from tests.support.until import until

CPU = torch.device("cpu")
ROWS, CHUNK, STEPS, VOCAB = 2, 16, 3, 320


class Steps:
    """Steps that engines have launched, by their graphs, whether they overlap, prompt tokens and rows that decode."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.seen: Counter[tuple[bool, int, int]] = Counter()
        self.replays = 0
        launch = StepRunner.launch

        def watched(runner: StepRunner, batch: Any, *given: Any) -> Any:
            launched = launch(runner, batch, *given)
            tokens = int(batch.extend_lens[: batch.num_extend].sum())
            self.seen[runner.mixed is not None, tokens, batch.num_decode] += 1
            self.replays = 0 if runner.mixed is None else runner.mixed.replays
            return launched

        patch.setattr(StepRunner, "launch", watched)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Steps:
    """Graphs on the CPU, whose replays dispatch nothing, as those of a GPU."""
    replay = TracedGraph.replay

    def at_once(graph: TracedGraph) -> None:
        with _disable_current_modes():
            replay(graph)

    monkeypatch.setattr(TracedGraph, "replay", at_once)
    monkeypatch.setattr("service.bench.gpu.DeviceStreams", lambda _: GraphStreams())
    monkeypatch.setattr("service.bench.gpu.measure_peaks", lambda *_: Peaks(1.0, None, 1.0))
    monkeypatch.setattr(build, "build_attention", lambda *_: MixedAttention())
    monkeypatch.setattr(mixed_graphs, "TOKENS", (CHUNK,))
    return Steps(monkeypatch)


def bench(budget: float) -> Bench:
    return Bench(CPU, "tiny", [Load(1, 16, 6, VOCAB)], "auto", Budget(budget), lambda _: None)


@pytest.mark.parametrize("overlaps", [(False,), (True, False)], ids=["inline", "both"])
def test_mixed_steps_are_measured_replayed_and_launched(overlaps: tuple[bool, ...], stand_in: Steps) -> None:
    made = bench(600.0)
    made.run_mixed([MixedLoad(ROWS, CHUNK, STEPS, VOCAB)], overlaps)
    found = made.result()["mixed"]
    ways = [(overlap, captured) for overlap in overlaps for captured in (True, False)]
    assert [(row["overlap"], row["cuda_graphs"]) for row in found] == ways
    # Two runs where planning overlaps; without, a third one that counts.
    for captured in (True, False):
        assert stand_in.seen[captured, CHUNK, ROWS] == (3 + 2 * (True in overlaps)) * STEPS, stand_in.seen
    for row in found:
        assert row["step_ms"] > 0 and (row["batch"], row["chunk"]) == (ROWS, CHUNK)
        assert row["prompt_tokens_per_second"] == pytest.approx(CHUNK / row["step_ms"] * 1000)
        assert 0 < row["tokens_per_second"] <= (STEPS + 4) / STEPS * ROWS / row["step_ms"] * 1000
    *overlapped, replayed, launched = (row["operations"] for row in found)
    assert overlapped == [None] * 2 * (True in overlaps)
    assert 0 < replayed < launched / 2, "the forward pass is one replay"


def test_what_has_no_room_in_the_budget_is_named(stand_in: Steps) -> None:
    made = bench(0.0)
    made.run_mixed([MixedLoad(ROWS, CHUNK, STEPS, VOCAB)])
    assert not stand_in.seen and len(made.mixed) == 4
    assert told(made.mixed[0]) == (
        "mixed steps with graphs on and overlap on: 16 prompt tokens beside 2 rows: "
        "the 0 s of --budget have no room for it"
    )


def test_loads_without_room_are_named(stand_in: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.bench.gpu.CPU_POOL", 600_000)
    made = bench(600.0)
    made.run_mixed([MixedLoad(64, CHUNK, STEPS, VOCAB)], (False,))
    assert not stand_in.seen and [row["batch"] for row in made.mixed] == [64] * 2
    assert all(row["left_out"].startswith("needs ") for row in made.mixed)


def test_a_figure_is_told_in_its_units() -> None:
    row = {"cuda_graphs": True, "overlap": False, "batch": 8, "chunk": 256, "step_ms": 12.346}
    row |= {"prompt_tokens_per_second": 20736.4, "tokens_per_second": 648.2, "operations": 41.4}
    assert told(row) == (
        "mixed steps with graphs on and overlap off: 256 prompt tokens beside 8 rows in 12.35 ms, "
        "20736 and 648 tokens/s, 41 operations"
    )
    assert told(row | {"operations": None}).endswith("648 tokens/s")


def test_loads_are_those_that_may_be_captured_and_fit_into_a_context() -> None:
    assert [load.batch for load in loads_of([64, 1, 512], 256, 128, 9)] == [1, 64]
    (most,) = loads_of([512], 256, 128, 9)
    assert (most.batch, most.steps) == (MOST_ROWS, MOST_STEPS)
    assert most.context == MOST_STEPS * 256 + 1 and MixedLoad(1, 16, 2, 9).context == CONTEXT + 22 + 1
    *short, long = MixedLoad(3, 16, 2, 9).prompts()
    assert [len(prompt) for prompt in short] == [CONTEXT] * 3 and len(long) == 32


def test_what_only_allocates_or_renames_is_no_operation() -> None:
    with Operations() as operations:
        made = torch.zeros(4).view(2, 2)
        torch.empty(3)
        made += 1
    assert operations.count == 2


async def test_tokens_are_those_of_the_rows_that_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two seconds from the question to the first token, in which six tokens come; one of them is the prompt's."""
    clock = by_hand(monkeypatch, decode_load)
    ended = asyncio.Event()

    class Engine:
        stats = SimpleNamespace(generation_tokens=10)

        async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
            return self.stream(len(request.token_ids) == CONTEXT)

        async def stream(self, decodes: bool) -> AsyncIterator[Delta]:
            if not decodes:
                clock.work(2.0)
                self.stats.generation_tokens += 6
            yield Delta(0, 0, (1,))
            if decodes:
                await ended.wait()

    engine: Any = Engine()
    load = MixedLoad(batch=1, chunk=4, steps=8, vocab=9)
    watching = asyncio.create_task(watch_mixed(engine, load))
    asyncio.get_running_loop().call_later(0.05, ended.set)
    figures = await watching
    assert (figures.step_ms, figures.prompt_tokens_per_second, figures.tokens_per_second) == (250.0, 16.0, 2.5)


async def test_rows_that_end_before_the_prompt_are_no_figure() -> None:
    readers = list[asyncio.Task[Any]]()

    class Engine:
        stats = SimpleNamespace(generation_tokens=0)

        async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
            return self.stream(len(request.token_ids) == CONTEXT)

        async def stream(self, decodes: bool) -> AsyncIterator[Delta]:
            task = asyncio.current_task()
            assert task is not None
            if decodes:
                readers.append(task)
            else:
                await until(lambda: all(reader.done() for reader in readers))
            yield Delta(0, 0, (1,))

    engine: Any = Engine()
    with pytest.raises(AssertionError, match="too short a time"):
        await watch_mixed(engine, MixedLoad(batch=1, chunk=4, steps=8, vocab=9))


async def test_the_time_of_a_step_is_taken_where_nothing_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a first run, which warms up; and a run that counts comes behind it."""
    runs: list[Any] = []

    async def watched(engine: Any, load: MixedLoad, within: Any = None) -> MixedFigures:
        runs.append(within)
        if within is not None:
            within.count = 12
        return MixedFigures(float(len(runs)), 1.0, 1.0)

    monkeypatch.setattr(mixed_load, "watch_mixed", watched)
    engine: Any = None
    load = MixedLoad(batch=1, chunk=4, steps=8, vocab=9)
    assert await measure_mixed(engine, load, counts=False) == MixedFigures(2.0, 1.0, 1.0)
    runs.clear()
    assert await measure_mixed(engine, load, counts=True) == MixedFigures(2.0, 1.0, 1.0, 1.5)
    assert runs[:2] == [None, None] and len(runs) == 3
