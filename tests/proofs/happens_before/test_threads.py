"""The whole engine with its real threads over lazy streams: hand-overs order what passes between them."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from queue import SimpleQueue
from types import ModuleType

import pytest
import torch

from core.config import EngineConfig
from core.device.streams import COPY, FORWARD, DeviceStreams
from core.engine.async_engine import AsyncEngine
from core.engine.build import assemble
from core.executor import completion, forward_thread
from core.executor.launched_step import RESULTS
from core.types.io import FinishReason
from tests.proofs.happens_before.clocks import VectorClocks
from tests.proofs.happens_before.handovers import record_handovers
from tests.proofs.happens_before.harness import CONTEXT, VOCAB, Scenario, record_staging, tokenizer
from tests.proofs.happens_before.hash_model import HashModel, expected_tokens
from tests.proofs.happens_before.lazy_ops import forget_memory
from tests.proofs.happens_before.lazy_streams import LazyStreams
from tests.proofs.happens_before.test_step_kinds import PENALTIES, prompt
from tests.support.engines import started
from tests.unit.core.engine.emulation import ask, last, read

LOOP, FORWARD_THREAD = "MainThread", "slipstream-forward"


def config() -> EngineConfig:
    plain = Scenario((), rows=3, chunk=8).config()
    return dataclasses.replace(plain, executor=dataclasses.replace(plain.executor, overlap=True))


@asynccontextmanager
async def recorded(
    patch: pytest.MonkeyPatch, clocks: VectorClocks, streams: DeviceStreams, *untold: tuple[ModuleType, str, type]
) -> AsyncIterator[AsyncEngine]:
    """A started engine whose every hand-over, prompt buffer and device access is told to `clocks`, but for `untold`."""
    record_handovers(patch, clocks)
    record_staging(patch, clocks)
    for module, name, plain in untold:
        patch.setattr(module, name, plain)
    built = assemble(config(), HashModel(VOCAB, CONTEXT), tokenizer(), streams)
    try:
        async with started(built) as engine:
            yield engine
    finally:
        forget_memory()


async def serve_some(engine: AsyncEngine, count: int = 5) -> None:
    """Plain and penalised requests, more than there are rows, and one that leaves early."""
    leaver = await engine.generate(ask(tuple(prompt(6)), tokens=40))
    plain = [read(engine, ask(tuple(prompt(4 + i)), tokens=6)) for i in range(count)]
    penalised = asyncio.create_task(read(engine, ask(tuple(prompt(9)), tokens=6, **PENALTIES)))
    answers = await asyncio.gather(*plain)
    engine.abort(leaver.request_id)
    assert (await last(leaver)).reason in (FinishReason.CANCELLED, FinishReason.LENGTH)
    assert [ids for ids, _, _ in answers] == [expected_tokens(prompt(4 + i), 6, VOCAB) for i in range(count)]
    assert len((await penalised)[0]) == 6


@pytest.mark.parametrize("number", range(3))
async def test_threads_and_streams_leave_nothing_unordered(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = VectorClocks()
    async with recorded(monkeypatch, clocks, LazyStreams(number, clocks)) as engine:
        await serve_some(engine)
    assert not clocks.races, clocks.story()
    assert clocks.accesses > 1000


async def test_the_production_streams_tell_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """No lazy device: what production hooks say of events and lanes is enough, so a GPU can be recorded alike."""
    clocks = VectorClocks()
    async with recorded(monkeypatch, clocks, DeviceStreams(torch.device("cpu"), clocks)) as engine:
        await serve_some(engine)
    assert not clocks.races, clocks.story()
    assert {FORWARD, COPY, FORWARD_THREAD} <= set(clocks.lanes)


@pytest.mark.parametrize(
    ("untold", "buffer", "lanes"),
    [
        ((forward_thread, "SimpleQueue", SimpleQueue), "batch", (LOOP, FORWARD)),
        ((completion, "deque", deque), RESULTS, (COPY, LOOP)),
    ],
    ids=["batches that pass no queue", "results that pass no deque"],
)
async def test_a_missing_handover_is_reported(
    untold: tuple[ModuleType, str, type], buffer: str, lanes: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clocks = VectorClocks()
    async with recorded(monkeypatch, clocks, DeviceStreams(torch.device("cpu"), clocks), untold) as engine:
        await read(engine, ask(tuple(prompt(9)), tokens=4))
    assert any(race.buffer == buffer and race.between(*lanes) for race in clocks.races), clocks.story()
