"""What concerns the model is done in all engines, and again in each that starts later."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from core.errors import (
    AdapterNotFound,
    Asleep,
    InvalidRequest,
    ModelLoadError,
    Overloaded,
)
from core.types.control import Activity, Nap, WeightSource
from service.errors import NotReady
from service.replicas import replica
from tests.support.until import PATIENCE, turns, until
from tests.unit.service.replicas.fakes import again, engines, fakes

NEW = WeightSource(path="new")


async def test_all_pause_and_resume_and_one_that_comes_later_is_paused() -> None:
    async with fakes() as rig:
        told: list[Activity] = []
        rig.replicas.control.follow(told.append)
        assert await rig.replicas.control.pause() == 14
        await until(lambda: told[-1] is Activity.PAUSED)
        assert (await again(rig, 1)).control.activity is Activity.PAUSED
        await rig.replicas.control.pause(ends=True)
        await until(lambda: told[-1] is Activity.REFUSING)
        assert (await again(rig, 0)).control.activity is Activity.REFUSING
        await rig.replicas.control.resume()
        await until(lambda: told[-1] is Activity.SERVING)
        assert (await again(rig, 0)).control.activity is Activity.SERVING


async def test_all_sleep_and_wake() -> None:
    async with fakes() as rig:
        assert await rig.replicas.control.sleep() == Nap(8192, 4)
        assert [engine.control.activity for engine in engines(rig)] == [Activity.ASLEEP] * 2
        with pytest.raises(Asleep):
            await rig.replicas.control.resume()
        assert (await again(rig, 0)).control.activity is Activity.ASLEEP
        await rig.replicas.control.wake()
        await until(lambda: rig.replicas.stats.activity is Activity.SERVING)
        assert (await again(rig, 1)).control.activity is Activity.SERVING


async def test_all_get_new_weights_and_one_that_comes_later_too() -> None:
    async with fakes(3) as rig:
        rig.replicas._router.books[1].seen.add((1, 2))
        update = await rig.replicas.control.update_weights(NEW, "second")
        assert (update.version, update.replaced, update.load_seconds, update.restarted) == ("second", "first", 1.5, 9)
        assert all(engine.control.updates == [NEW] for engine in engines(rig))
        assert not len(rig.replicas._router.books[1].seen), "what was computed with the old ones is no help"
        assert update.held_seconds == 0.25
        await until(lambda: rig.replicas.stats.weight_version == "second")
        assert (await again(rig, 2)).control.version == "second"
        await until(lambda: rig.replicas.stats.weight_version == "second")


async def test_weights_that_none_can_take_change_nothing() -> None:
    async with fakes() as rig:
        for engine in engines(rig):
            engine.control.refuse_with = InvalidRequest.of("path", "has other shapes")
        with pytest.raises(InvalidRequest, match="other shapes"):
            await rig.replicas.control.update_weights(NEW, "second")
        assert len(rig.processes) == 2
        assert (await again(rig, 0)).control.version == "first"


async def test_one_that_cannot_take_what_the_others_took_is_started_with_it() -> None:
    async with fakes() as rig:
        engines(rig)[1].control.refuse_with = Overloaded("no memory", reason="WEIGHT_MEMORY")
        assert (await rig.replicas.control.update_weights(NEW, "second")).version == "second"
        await until(lambda: len(rig.processes) == 3 and rig.replicas.stats.replicas[1].ready)
        assert [engine.control.version for engine in engines(rig)] == ["second", "second"]


async def test_weights_by_name_are_fetched_once_before_engines_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[str] = []

    def fetch(name: str) -> Path:
        if name == "org/none":
            raise ModelLoadError("it has no such model")
        fetched.append(name)
        return Path("/")

    async with fakes() as rig:
        rig.replicas.control.fetch_by(fetch)
        await rig.replicas.control.update_weights(WeightSource(name="org/new"), "second")
        assert fetched == ["org/new"]
        with pytest.raises(ModelLoadError, match="no such model"):
            await rig.replicas.control.update_weights(WeightSource(name="org/none"), "third")
        assert [engine.control.version for engine in engines(rig)] == ["second"] * 2


async def test_engines_come_back_while_weights_are_fetched() -> None:
    gate, going = threading.Event(), threading.Event()

    def fetch(_name: str) -> Path:
        going.set()
        gate.wait(9 * PATIENCE)
        return Path("/")

    async with fakes() as rig:
        rig.replicas.control.fetch_by(fetch)
        updating = asyncio.create_task(rig.replicas.control.update_weights(WeightSource(name="org/new"), "second"))
        await asyncio.to_thread(going.wait, PATIENCE)
        try:
            await again(rig, 0)
            assert await rig.replicas.control.pause() == 14
        finally:
            gate.set()
        assert (await updating).version == "second"
        assert [engine.control.version for engine in engines(rig)] == ["second"] * 2


async def test_a_caller_that_leaves_does_not_end_what_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fakes() as rig:
        going, gate = asyncio.Event(), asyncio.Event()
        update = engines(rig)[1].control.update_weights

        async def slow(source: WeightSource, version: str) -> Any:
            going.set()
            await gate.wait()
            return await update(source, version)

        monkeypatch.setattr(engines(rig)[1].control, "update_weights", slow)
        asking = asyncio.create_task(rig.replicas.control.update_weights(NEW, "second"))
        await going.wait()
        asking.cancel()
        await asyncio.wait((asking,))
        pausing = asyncio.create_task(rig.replicas.control.pause())
        gate.set()
        assert await pausing == 14, "after the update, which calls wait for"
        assert [engine.control.version for engine in engines(rig)] == ["second"] * 2
        assert (await again(rig, 0)).control.version == "second"


async def test_an_engine_that_ends_meanwhile_is_no_error() -> None:
    async with fakes() as rig:
        rig.lose(0)
        assert await rig.replicas.control.pause() == 7
        await until(lambda: len(rig.processes) == 3 and rig.replicas.stats.replicas[0].ready)
        assert [engine.control.activity for engine in engines(rig)] == [Activity.PAUSED] * 2
        rig.refuse.update((0, 1))
        rig.lose(0)
        rig.lose(1)
        with pytest.raises(NotReady):
            await rig.replicas.control.resume()


async def test_a_silent_engine_holds_up_no_call_and_is_made_as_the_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fakes() as rig:
        gate = asyncio.Event()
        for method in ("pause", "sleep"):
            monkeypatch.setattr(engines(rig)[0].control, method, lambda **_: gate.wait())
        pausing = asyncio.create_task(rig.replicas.control.pause())
        await until(lambda: engines(rig)[1].control.activity is Activity.PAUSED)
        assert not pausing.done()
        monkeypatch.setattr(replica, "STALE_SECONDS", -1.0)
        rig.replicas._replicas[0].look(0.0)
        monkeypatch.setattr(replica, "STALE_SECONDS", 3.0)
        assert await asyncio.wait_for(pausing, PATIENCE) == 7
        await until(lambda: len(rig.processes) == 3 and rig.replicas.stats.replicas[0].ready)
        assert [engine.control.activity for engine in engines(rig)] == [Activity.PAUSED] * 2
        gate.set()


async def test_one_that_is_silent_before_is_not_asked() -> None:
    async with fakes() as rig:
        rig.replicas._replicas[0].silent = True
        listed = await rig.replicas.list_adapters()
        assert not listed.adapters and len(rig.processes) == 2, "which changes nothing"
        assert await rig.replicas.control.pause() == 7
        await until(lambda: len(rig.processes) == 3 and rig.replicas.stats.replicas[0].ready)
        assert [engine.control.activity for engine in engines(rig)] == [Activity.PAUSED] * 2


async def test_what_none_can_do_leaves_a_silent_one_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    restarted: list[int] = []
    async with fakes() as rig:
        monkeypatch.setattr(rig.replicas, "restart", lambda place, _: restarted.append(place))
        rig.replicas._replicas[1].silent = True
        with pytest.raises(AdapterNotFound):
            await rig.replicas.unload_adapter("nonesuch")
        assert not restarted, "it is as the others are"


async def test_only_one_change_of_weights_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fakes() as rig:
        going, gate = asyncio.Event(), asyncio.Event()

        async def slow(_source: WeightSource, _version: str) -> Any:
            going.set()
            await gate.wait()
            raise InvalidRequest.of("path", "is not there")

        monkeypatch.setattr(engines(rig)[0].control, "update_weights", slow)
        updating = asyncio.create_task(rig.replicas.control.update_weights(NEW, "second"))
        await going.wait()
        for call in (rig.replicas.control.sleep, rig.replicas.control.wake):
            asking = asyncio.create_task(call())
            await turns(50)
            assert asking.done(), "it waits"
            refused = asking.exception()
            assert isinstance(refused, Overloaded) and refused.reason == "CONTROL_BUSY"
        gate.set()
        assert (await updating).version == "second"
        await until(lambda: len(rig.processes) == 3 and rig.replicas.stats.replicas[0].ready)
        assert engines(rig)[0].control.version == "second"
        assert rig.replicas.stats.weight_updates == 1 and rig.replicas.stats.weight_update_failures == 0
        for engine in engines(rig):
            engine.control.refuse_with = InvalidRequest.of("path", "is gone")
        with pytest.raises(InvalidRequest):
            await rig.replicas.control.update_weights(NEW, "third")
        assert rig.replicas.stats.weight_updates == rig.replicas.stats.weight_update_failures == 1
        for engine in engines(rig):
            engine.control.refuse_with = None
        await rig.replicas.control.sleep()


@pytest.mark.parametrize("call", ["pause", "sleep", "wake", "resume"])
async def test_what_some_can_do_is_done_and_the_others_start_again_alike(call: str) -> None:
    async with fakes() as rig:
        if call == "wake":
            await rig.replicas.control.sleep()
        if call == "resume":
            await rig.replicas.control.pause()
        engines(rig)[1].control.refuse_with = Overloaded("no memory", reason="WEIGHT_MEMORY")
        await getattr(rig.replicas.control, call)()
        await until(lambda: len(rig.processes) == 3 and rig.replicas.stats.replicas[1].ready)
        wanted = {"pause": Activity.PAUSED, "sleep": Activity.ASLEEP}.get(call, Activity.SERVING)
        assert [engine.control.activity for engine in engines(rig)] == [wanted] * 2
        for engine in engines(rig):
            engine.control.refuse_with = Overloaded("busy", reason="CONTROL_BUSY")
        with pytest.raises(Overloaded, match="busy"):
            await getattr(rig.replicas.control, call)()
        assert len(rig.processes) == 3, "what none can do changes nothing"


async def test_one_that_has_started_again_meanwhile_is_left_alone() -> None:
    async with fakes() as rig:
        old = rig.replicas.ready()[0]
        await again(rig, 0)
        rig.replicas.restart(0, old)
        await turns(200)
        assert rig.replicas.ready().get(0) not in (None, old)
