"""Adapters loaded and unloaded over gRPC while the server streams: the tokens are PEFT's, and nobody else notices."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest

from core.batch.schedule_batch import ScheduleBatch
from core.executor.launched_step import LaunchedStep
from core.executor.step import StepRunner
from core.models.lora.packed import Adapter
from service.client import CallFailed, Chunk
from service.pb.slipstream.v1 import adapters_pb2 as pb
from tests.proofs.equivalence.adapter_world import GREEDY, Serving, World
from tests.support.within import within

LONG = 60
FIRST_STEPS = 3
"""Enough for a prompt and its first token."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"), prompts=4)


async def refusal(call: Any) -> tuple[str, str]:
    """Code and reason that `call` ends with."""
    with pytest.raises(CallFailed) as failed:
        await call
    return failed.value.code.name, failed.value.reason


async def test_load_generate_unload_and_other_weights_under_the_name(world: World) -> None:
    not_found = ("NOT_FOUND", "ADAPTER_NOT_FOUND")
    async with world.serve() as serving:
        assert await refusal(serving.ask(0, "x")) == not_found
        loads = []
        for path in ("narrow", "twin", "narrow"):
            loaded = (await serving.adapters.load("x", path)).adapter
            loads.append(loaded.load_id)
            assert loaded.bytes == world.nbytes[path] == serving.server.engine.stats.adapter_bytes
            # A step without adapters comes first: what the device must know of them is not lost with it.
            assert (await serving.ask(0, ""))[0] == world.answer(0, "")
            assert await serving.ask(0, "x") == (world.answer(0, path), 0), "KV of an earlier load is no prefix"
            ids, cached = await serving.ask(0, "x")
            assert ids == world.answer(0, path) and cached > 0
            assert await serving.adapters.unload("x") == 0
            assert await refusal(serving.ask(0, "x")) == not_found
            assert serving.server.engine.stats.adapter_bytes == serving.server.engine.stats.adapters_loaded == 0
        assert len(set(loads)) == 3
        assert await refusal(serving.adapters.unload("x")) == not_found


async def test_the_path_is_the_name_if_none_is_given_and_facts_are_listed(world: World) -> None:
    async with world.serve(adapter=(("given", str(world.root / "regex")),)) as serving:
        await serving.adapters.load("all", pinned=True)
        await serving.adapters.load("narrow")
        await serving.ask(0, "narrow")
        listed = await serving.adapters.list()
    given, wide, narrow = listed.adapters
    assert [(a.name, a.rank, a.pinned) for a in listed.adapters] == [
        ("given", 4, True),
        ("all", 8, True),
        ("narrow", 2, False),
    ]
    assert narrow.HasField("idle") and not given.HasField("idle") and not wide.HasField("idle")
    assert listed.used_bytes == sum(world.nbytes[path] for path in ("regex", "all", "narrow")) < listed.max_bytes
    assert {a.state for a in listed.adapters} == {pb.ADAPTER_STATE_READY}


async def test_the_least_recently_used_gives_way_within_the_bound(world: World) -> None:
    room = sum(world.nbytes[path] for path in ("narrow", "twin", "regex"))
    async with world.serve(max_lora_bytes=room) as serving:
        for path in ("narrow", "twin", "regex"):
            assert not (await serving.adapters.load(path)).evicted
        for path in ("narrow", "regex"):
            await serving.ask(1, path)
        again = await serving.adapters.load("again", "narrow")
        assert list(again.evicted) == ["twin"], "never used"
        assert await refusal(serving.ask(1, "twin")) == ("NOT_FOUND", "ADAPTER_NOT_FOUND")
        await serving.ask(1, "narrow")
        await serving.ask(1, "again")
        assert list((await serving.adapters.load("twin")).evicted) == ["regex"]
        for name, path in (("again", "narrow"), ("narrow", "narrow"), ("twin", "twin")):
            assert (await serving.ask(1, name))[0] == world.answer(1, path)
        assert await serving.names() == ["narrow", "again", "twin"]
        stats = serving.server.engine.stats
        assert stats.adapter_evictions == 2 and stats.adapter_bytes <= room
        assert await refusal(serving.adapters.load("wide", "all")) == ("INVALID_ARGUMENT", "INVALID_REQUEST")
        assert await serving.names() == ["narrow", "again", "twin"], "what cannot fit evicts nobody"


class Gate:
    """The forward thread waits in front of every step while the gate is shut."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.shut = threading.Event()
        self._left: int | None = None
        launch = StepRunner.launch

        def held(runner: StepRunner, batch: ScheduleBatch, *rest: Any) -> LaunchedStep:
            if self._left == 0:
                self.open.clear()
                self.shut.set()
            self._left = self._left - 1 if self._left else None
            assert self.open.wait(30)
            return launch(runner, batch, *rest)

        self.launch = held

    def shut_after(self, steps: int) -> None:
        """Let so many steps more through, then shut. A test that shut it itself could come after its stream's end."""
        self._left = steps


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    made = Gate()
    monkeypatch.setattr(StepRunner, "launch", made.launch)
    return made


async def begin(serving: Serving, gate: Gate, adapter: str) -> tuple[Any, list[int]]:
    """A stream that has begun and cannot go on, and its first tokens."""
    stream = serving.client.generate(serving.world.prompts[2], adapter=adapter, max_tokens=LONG, **GREEDY)
    gate.shut_after(FIRST_STEPS)
    first = await anext(stream)
    # A gate that shuts only after the test has opened it stays shut.
    assert await asyncio.to_thread(gate.shut.wait, 30)
    return stream, list(first.token_ids)


async def rest(stream: Any, ids: list[int]) -> list[int]:
    async for event in stream:
        if isinstance(event, Chunk):
            ids += event.token_ids
    return ids


async def listed(serving: Serving, wanted: list[tuple[str, int, int]]) -> None:
    """Until names, states and requests are these."""
    async with within(10, f"{wanted} are listed"):
        while [(a.name, a.state, a.live_requests) for a in (await serving.adapters.list()).adapters] != wanted:
            await asyncio.sleep(0)


async def test_an_adapter_in_use_is_neither_evicted_nor_cut_short(world: World, gate: Gate) -> None:
    """Unloaded, it runs on beside other weights of its name, and goes with its last request."""
    async with world.serve(max_lora_bytes=2 * world.nbytes["narrow"]) as serving:
        await serving.adapters.load("x", "narrow")
        old, first = await begin(serving, gate, "x")
        assert await serving.adapters.unload("x") == 1
        assert await refusal(serving.ask(2, "x")) == ("NOT_FOUND", "ADAPTER_NOT_FOUND")
        await serving.adapters.load("x", "twin")
        new = asyncio.create_task(serving.ask(2, "x", LONG))
        await listed(serving, [("x", pb.ADAPTER_STATE_UNLOADING, 1), ("x", pb.ADAPTER_STATE_READY, 1)])
        full = await refusal(serving.adapters.load("y", "narrow"))
        assert full == ("RESOURCE_EXHAUSTED", "ADAPTER_MEMORY")
        gate.open.set()
        assert await rest(old, first) == world.answer(2, "narrow", LONG)
        assert (await new)[0] == world.answer(2, "twin", LONG)
        await listed(serving, [("x", pb.ADAPTER_STATE_READY, 0)])
        assert serving.server.engine.stats.adapter_bytes == world.nbytes["twin"]
        await serving.adapters.load("y", "narrow")


async def test_a_cancelled_request_gives_its_adapter_back(world: World, gate: Gate) -> None:
    async with world.serve() as serving:
        await serving.adapters.load("narrow")
        stream, _ = await begin(serving, gate, "narrow")
        await listed(serving, [("narrow", pb.ADAPTER_STATE_READY, 1)])
        await stream.aclose()
        gate.open.set()
        await listed(serving, [("narrow", pb.ADAPTER_STATE_READY, 0)])
        assert await serving.adapters.unload("narrow") == 0 and await serving.names() == []


class HeldReading:
    """Reading that waits for the test, in the loader's thread."""

    def __init__(self, serving: Serving) -> None:
        engine: Any = serving.server.engine
        self.loader = engine._adapters
        self._read = self.loader._read
        self.begun, self.go = threading.Event(), threading.Event()
        self.loader._read = self

    def __call__(self, directory: Path) -> Adapter:
        assert threading.current_thread() is not threading.main_thread()
        self.begun.set()
        assert self.go.wait(30)
        adapter: Adapter = self._read(directory)
        return adapter


async def test_streams_go_on_while_an_adapter_is_read(world: World) -> None:
    async with world.serve() as serving:
        reading = HeldReading(serving)
        load = asyncio.create_task(serving.adapters.load("x", "narrow"))
        assert await asyncio.to_thread(reading.begun.wait, 30)
        assert (await serving.ask(3, ""))[0] == world.answer(3, "")
        assert await refusal(serving.ask(3, "x")) == ("NOT_FOUND", "ADAPTER_NOT_FOUND")
        assert await refusal(serving.adapters.load("x", "twin")) == ("ALREADY_EXISTS", "ADAPTER_EXISTS")
        waiting = [asyncio.create_task(serving.adapters.load(f"y{i}", "twin")) for i in range(15)]
        async with asyncio.timeout(10):
            while len(reading.loader._loading) < 16:
                await asyncio.sleep(0)
        assert await refusal(serving.adapters.load("z", "twin")) == ("RESOURCE_EXHAUSTED", "ADAPTER_LOADS")
        for each in waiting:
            each.cancel()
        async with within(10, "cancelled loads leave their places"):
            while len(reading.loader._loading) > 1:
                await asyncio.sleep(0)
        reading.go.set()
        await load
        assert (await serving.ask(3, "x"))[0] == world.answer(3, "narrow")
        assert await serving.names() == ["x"], "a cancelled load leaves nothing"
        assert await refusal(serving.adapters.load("x", "twin")) == ("ALREADY_EXISTS", "ADAPTER_EXISTS")
        await serving.adapters.load("y0", "twin")


async def test_a_load_that_ends_in_a_drain_is_refused(world: World) -> None:
    async with world.serve() as serving:
        reading = HeldReading(serving)
        load = asyncio.create_task(serving.adapters.load("x", "narrow"))
        assert await asyncio.to_thread(reading.begun.wait, 30)
        draining = asyncio.create_task(serving.server.engine.drain(5.0))
        await asyncio.sleep(0)
        reading.go.set()
        with pytest.raises(CallFailed) as refused:
            await load
        assert (refused.value.code, refused.value.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        assert await draining == 0 and await serving.names() == []


@pytest.mark.parametrize(("overlap", "loads"), [(True, 20), (False, 8)])
async def test_eight_streams_beside_twenty_loads(world: World, overlap: bool, loads: int) -> None:
    """Adapters come, answer, are evicted or unloaded, and some do not fit: every stream has its own tokens."""
    names = ("", "all", "patterns", "twin")
    room = sum(world.nbytes[path] for path in ("all", "patterns", "twin", "regex"))
    done = asyncio.Event()

    async def stream(serving: Serving, number: int) -> int:
        rounds = 0
        while not done.is_set() or not rounds:
            prompt, name = (number + rounds) % 4, names[number % 4]
            assert (await serving.ask(prompt, name))[0] == world.answer(prompt, name), (number, rounds)
            rounds += 1
        return rounds

    async def churn(serving: Serving) -> None:
        for number in range(loads):
            path = ("narrow", "regex")[number % 2]
            await serving.adapters.load(f"x{number}", path)
            assert (await serving.ask(number % 4, f"x{number}"))[0] == world.answer(number % 4, path)
            assert await refusal(serving.adapters.load("y", "broken")) == ("INVALID_ARGUMENT", "INVALID_REQUEST")
            if number % 3 == 0:
                assert await serving.adapters.unload(f"x{number}") == 0
        done.set()

    async with world.serve(max_lora_bytes=room, overlap=overlap) as serving:
        for name in names[1:]:
            await serving.adapters.load(name, pinned=True)
        async with asyncio.TaskGroup() as tasks:
            streams = [tasks.create_task(stream(serving, number)) for number in range(8)]
            tasks.create_task(churn(serving))
        stats = serving.server.engine.stats
        assert stats.adapter_evictions > 3 and stats.adapter_load_failures == loads
        assert stats.histograms["adapter_load_seconds"].counts[-1] == loads + 3
        assert sum(task.result() for task in streams) >= 16
        for name in await serving.names():
            await serving.adapters.unload(name)
        assert serving.server.engine.stats.adapter_bytes == 0
        assert sum(serving.server.engine.stats.assert_failures.values()) == 0
