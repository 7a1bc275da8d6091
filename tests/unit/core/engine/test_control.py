"""Pause and sleep: what waits, what is refused, and what a drain or the engine's end does meanwhile."""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from core.engine.api import EngineState
from core.engine.control import WEIGHT_MEMORY
from core.engine.renewal import Renewal
from core.engine.standstill import Standstill
from core.errors import Asleep, DeadlinePassed, Draining, EngineDead, Overloaded, Paused
from core.text.tokenizer import Tokenizer
from core.types.control import Activity
from core.types.io import GenerateRequest
from tests.support.until import turns, until
from tests.support.within import within
from tests.unit.core.engine.emulation import HookedModel, ask, assert_opened, assert_serves, read, running


@pytest.fixture
def model(tokenizer: Tokenizer) -> HookedModel:
    return HookedModel(tokenizer)


async def test_a_pause_plans_no_step_and_everything_waits(tokenizer: Tokenizer, model: HookedModel) -> None:
    async with running(tokenizer, model) as engine:
        told = list[Activity]()
        engine.control.follow(told.append)
        first = asyncio.create_task(read(engine, ask(tokens=400)))
        await until(lambda: model.step > 3)
        assert await engine.control.pause() == 1 and await engine.control.pause() == 1
        assert_serves(engine, Activity.PAUSED)
        steps = model.step
        second = asyncio.create_task(read(engine, ask((9, 9))))
        await until(lambda: engine.live_requests == 2)
        await turns(200)
        assert model.step == steps and not first.done() and not second.done()
        await engine.control.resume()
        await engine.control.resume()
        assert_serves(engine)
        assert len((await first)[0]) == 400 and len((await second)[0]) == 8
        assert told == [Activity.SERVING, Activity.PAUSED, Activity.PAUSED, Activity.SERVING, Activity.SERVING]


async def test_a_pause_answers_once_no_step_is_in_flight(tokenizer: Tokenizer, model: HookedModel) -> None:
    gate = threading.Event()
    model.hook = lambda step, *_: assert_opened(gate) if step == 3 else None
    async with running(tokenizer, model) as engine:
        reader = asyncio.create_task(read(engine, ask(tokens=20)))
        await until(lambda: model.step == 3)
        pausing = asyncio.create_task(engine.control.pause())
        await turns(50)
        assert not pausing.done()
        gate.set()
        assert await pausing == 1
        steps = model.step
        await turns(50)
        assert model.step == steps <= 4
        await engine.control.resume()
        assert len((await reader)[0]) == 20


async def test_of_those_that_wait_for_the_last_step_one_may_leave() -> None:
    """Its place may still be there when the others are told."""
    scheduler: Any = SimpleNamespace(held=False, is_still=False)
    still = Standstill(scheduler, lambda: None)
    leaves, stays = (asyncio.create_task(still.reached()) for _ in range(2))
    await turns(1)
    leaves.cancel()
    scheduler.is_still = True
    still.look()
    await stays
    assert leaves.cancelled()


async def test_what_ended_it_first_is_what_every_wait_hears() -> None:
    """An engine that died is stopped later: a caller is told of the death, not of the stop."""
    scheduler: Any = SimpleNamespace(held=False, is_still=False)
    still = Standstill(scheduler, lambda: None)
    waits = asyncio.create_task(still.reached())
    await turns(1)
    still.close(EngineDead("the device is lost"))
    still.close(Draining("the server is shutting down"))
    with pytest.raises(EngineDead):
        await waits
    with pytest.raises(EngineDead):
        await still.reached()


async def test_a_pause_that_ends_streams_refuses_others(tokenizer: Tokenizer, model: HookedModel) -> None:
    async with running(tokenizer, model) as engine:
        reader = asyncio.create_task(read(engine, ask(tokens=400)))
        await until(lambda: model.step > 3)
        assert await engine.control.pause(ends=True) == 1
        with pytest.raises(Paused, match="another replica"):
            await reader
        with pytest.raises(Paused):
            await engine.generate(ask())
        assert_serves(engine, Activity.REFUSING)
        assert not engine.stats.activity.invites
        await until(lambda: all(pool.used == 0 for pool in engine.stats.pools))
        await engine.control.pause()
        waits = asyncio.create_task(read(engine, ask()))
        await until(lambda: engine.live_requests)
        await engine.control.pause(ends=True)
        with pytest.raises(Paused):
            await waits
        await engine.control.resume()
        assert len((await read(engine, ask()))[0]) == 8


async def test_requests_that_arrive_are_ended_too(
    tokenizer: Tokenizer, model: HookedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was being tokenised when the pause began."""
    async with running(tokenizer, model) as engine:
        arrived, gate = threading.Event(), threading.Event()
        encode = tokenizer.encode

        def slowly(*args: Any, **named: Any) -> Any:
            arrived.set()
            assert_opened(gate)
            return encode(*args, **named)

        monkeypatch.setattr(tokenizer, "encode", slowly)
        late = asyncio.create_task(engine.generate(GenerateRequest(text="abc " * 99)))
        await until(arrived.is_set)
        await engine.control.pause(ends=True)
        gate.set()
        with pytest.raises(Paused):
            await late


async def test_deadlines_pass_in_a_pause(tokenizer: Tokenizer, model: HookedModel) -> None:
    async with running(tokenizer, model) as engine:
        await engine.control.pause()
        with pytest.raises(DeadlinePassed):
            await read(engine, ask(deadline=time.monotonic() + 0.05))


@pytest.mark.parametrize("asleep", [False, True])
async def test_a_drain_does_not_wait_for_what_waits_itself(
    tokenizer: Tokenizer, model: HookedModel, asleep: bool
) -> None:
    async with running(tokenizer, model) as engine:
        reader = asyncio.create_task(read(engine, ask(tokens=400)))
        await until(lambda: model.step > 3)
        await (engine.control.sleep() if asleep else engine.control.pause())
        async with asyncio.timeout(30):
            assert await engine.drain(600) == 1
        with pytest.raises(Draining):
            await reader
        for method in (engine.control.pause, engine.control.resume, engine.control.sleep, engine.control.wake):
            with pytest.raises(Draining):
                await method()


async def test_a_pause_ends_with_the_engine(tokenizer: Tokenizer, model: HookedModel) -> None:
    def breaks(step: int, *_: Any) -> None:
        if step == 3:
            assert_opened(gate)
            raise RuntimeError("the device is gone")

    gate, model.hook = threading.Event(), breaks
    async with running(tokenizer, model) as engine:
        reader = asyncio.create_task(read(engine, ask(tokens=400)))
        await until(lambda: model.step == 3)
        pausing = asyncio.create_task(engine.control.pause())
        await turns(20)
        gate.set()
        for waits in (pausing, reader):
            async with within(20.0, "what waits ends with the engine"):
                with pytest.raises(EngineDead):
                    await waits
        with pytest.raises(EngineDead):
            await engine.control.wake()


async def test_sleep_waits_for_wake(tokenizer: Tokenizer, model: HookedModel) -> None:
    async with running(tokenizer, model, max_total_tokens=1 << 16) as engine:
        reader = asyncio.create_task(read(engine, ask(tokens=300)))
        await until(lambda: model.step > 3)
        nap = await engine.control.sleep()
        assert nap.live_requests == 1 and (await engine.control.sleep()).freed_bytes == 0
        assert_serves(engine, Activity.ASLEEP)
        with pytest.raises(Asleep):
            await engine.control.resume()
        other = asyncio.create_task(read(engine, ask((9, 9))))
        await until(lambda: engine.live_requests == 2)
        steps = model.step
        await turns(100)
        assert model.step == steps
        await engine.control.wake()
        await engine.control.wake()
        assert_serves(engine)
        assert len((await reader)[0]) == 300 and len((await other)[0]) == 8


async def test_without_memory_it_sleeps_on(
    tokenizer: Tokenizer, model: HookedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tokenizer, model) as engine:
        await engine.control.sleep()
        with monkeypatch.context() as patch:
            patch.setattr(Renewal, "wake", lambda _: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA")))
            with pytest.raises(Overloaded, match="to wake") as refused:
                await engine.control.wake()
            assert refused.value.reason == WEIGHT_MEMORY
        assert_serves(engine, Activity.ASLEEP)
        await engine.control.wake()
        assert len((await read(engine, ask()))[0]) == 8


async def test_what_cannot_be_given_back_ends_the_engine(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(tokenizer) as engine:
        monkeypatch.setattr(Renewal, "give_back", lambda _: (_ for _ in ()).throw(RuntimeError("half of it")))
        with pytest.raises(RuntimeError, match="half of it"):
            await engine.control.sleep()
        assert engine.state is EngineState.DEAD
