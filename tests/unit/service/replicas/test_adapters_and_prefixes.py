"""Adapters and prefix caches of all engines: loaded in all or in none, told apart, followed together."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from core.engine.api import PrefixWatch
from core.errors import (
    AdapterExists,
    AdapterNotFound,
    EngineDead,
    Overloaded,
    SlowConsumer,
    Unsupported,
)
from core.types.control import Activity, WeightSource
from core.types.prefixes import PrefixRemoved, PrefixStored
from tests.support.fakes.fake_engine import FakeEngine
from tests.support.fakes.fake_prefixes import stored
from tests.support.until import PATIENCE, until
from tests.unit.service.replicas.fakes import again, engines, fakes
from tests.unit.service.replicas.rig import replicas

NEW = WeightSource(path="new")


async def test_an_adapter_call_that_is_cut_off_leaves_all_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fakes() as rig:
        going, gate = asyncio.Event(), asyncio.Event()
        load = engines(rig)[1].load_adapter

        async def slow(name: str, path: str, *, pinned: bool = False) -> Any:
            going.set()
            await gate.wait()
            return await load(name, path, pinned=pinned)

        monkeypatch.setattr(engines(rig)[1], "load_adapter", slow)
        loading = asyncio.create_task(rig.replicas.load_adapter("a", "path"))
        await going.wait()
        loading.cancel()
        await asyncio.wait((loading,))
        gate.set()
        assert await rig.replicas.unload_adapter("a") == 0, "behind the load, which went on"
        assert [list(engine.adapters) for engine in engines(rig)] == [[], []]
        assert not (await again(rig, 0)).adapters


async def test_one_that_comes_later_has_the_adapters_that_the_others_still_have() -> None:
    async with fakes() as rig:
        for name in "abc":
            await rig.replicas.load_adapter(name, name)
        for engine in engines(rig):
            engine.adapters.pop("b")
        assert list((await again(rig, 1)).adapters) == ["a", "c"]
        rig.make = lambda _: Refusing()
        assert list((await again(rig, 1)).adapters) == ["a"], "what it refuses does not keep it from serving"


class Refusing(FakeEngine):
    """Has room for one adapter."""

    async def load_adapter(self, name: str, path: str, *, pinned: bool = False) -> Any:
        if self.adapters:
            raise Overloaded("no room", reason="ADAPTER_MEMORY")
        return await super().load_adapter(name, path, pinned=pinned)


async def test_adapters_are_in_all_or_in_none() -> None:
    async with fakes() as rig:
        load = await rig.replicas.load_adapter("a", "evicts", pinned=True)
        assert load.adapter.name == "a" and load.adapter.pinned and load.evicted == ("older",)
        await rig.replicas.load_adapter("b", "path")
        assert [list(engine.adapters) for engine in engines(rig)] == [["a", "b"]] * 2
        engines(rig)[0].refuse_with = Overloaded("no room", reason="ADAPTER_MEMORY")
        with pytest.raises(Overloaded, match="no room"):
            await rig.replicas.load_adapter("c", "path")
        engines(rig)[0].refuse_with = None
        assert [list(engine.adapters) for engine in engines(rig)] == [["a", "b"]] * 2
        with pytest.raises(AdapterExists):
            await rig.replicas.load_adapter("a", "path")
        assert [list(engine.adapters) for engine in engines(rig)] == [["a", "b"]] * 2, "which is not unloaded"
        assert await rig.replicas.unload_adapter("b") == 0
        listed = await rig.replicas.list_adapters()
        assert [info.name for info in listed.adapters] == ["a"] and (listed.used_bytes, listed.max_bytes) == (
            1000,
            4000,
        )
        late = await again(rig, 1)
        assert list(late.adapters) == ["a"] and late.adapters["a"].pinned


async def test_an_adapter_that_one_has_evicted_is_unloaded_in_the_others() -> None:
    async with fakes() as rig:
        await rig.replicas.load_adapter("a", "path")
        engines(rig)[0].adapters.clear()
        assert await rig.replicas.unload_adapter("a") == 0
        with pytest.raises(AdapterNotFound):
            await rig.replicas.unload_adapter("a")
        assert not (await rig.replicas.list_adapters()).adapters


async def test_an_adapter_of_the_settings_that_was_unloaded_stays_so() -> None:
    async with replicas(2, make=lambda _: Preloaded()) as rig:
        assert await rig.replicas.unload_adapter("own") == 0
        assert not (await again(rig, 0)).adapters


class Preloaded(FakeEngine):
    """An engine whose settings name an adapter."""

    async def start(self) -> Any:
        await self.load_adapter("own", "path")
        return await super().start()


async def test_prefixes_of_all_are_told_apart_and_flushed_together() -> None:
    async with fakes() as rig:
        for place, engine in enumerate(engines(rig)):
            engine.prefixes.contents["salt"] = [stored(0, [1, 2]), stored(2, [3 + place])]
        watch = await rig.replicas.prefixes.watch("salt")
        known = {}
        for each in watch.contents:
            known |= dict(zip(each.pages.tolist(), [each.parent, *each.pages.tolist()], strict=False))
        assert sorted(known) == [2, 3, 4, 5, 6, 9] and known[6] == 4 and known[9] == 5
        assert (known[2], known[3], watch.page_size) == (0, 0, 4)
        first, second = (engine.prefixes.watches[0] for engine in engines(rig))
        second.queue.put_nowait([PrefixRemoved(np.array([4])), stored(2, [7])])
        removed, more = await watch.changes()
        assert isinstance(removed, PrefixRemoved) and removed.pages.tolist() == [9]
        assert isinstance(more, PrefixStored) and (more.parent, more.pages.tolist()) == (5, [15])
        first.queue.put_nowait([stored(0, [8])])
        (change,) = await watch.changes()
        assert isinstance(change, PrefixStored) and (change.parent, change.pages.tolist()) == (0, [16])
        first.queue.put_nowait(SlowConsumer("read faster"))
        with pytest.raises(SlowConsumer, match="faster"):
            await watch.changes()
        watch.close()
        await until(lambda: first.closed and second.closed)
        rig.replicas._router.books[0].seen.add((1,))
        assert await rig.replicas.prefixes.flush() == 6 and await rig.replicas.prefixes.flush("alice") == 6
        assert [engine.prefixes.flushed for engine in engines(rig)] == [[None, "alice"]] * 2
        assert not len(rig.replicas._router.books[0].seen)


async def test_a_watch_goes_on_while_engines_pause() -> None:
    async with fakes() as rig:
        watch = await rig.replicas.prefixes.watch("")
        asking = asyncio.ensure_future(watch.changes())
        await rig.replicas.control.pause()
        await until(lambda: rig.replicas.stats.activity is Activity.PAUSED)
        engines(rig)[0].prefixes.watches[0].queue.put_nowait([stored(0, [8])])
        assert len(await asyncio.wait_for(asking, PATIENCE)) == 1
        watch.close()


async def test_a_watch_begins_anew_when_an_engine_comes_or_goes() -> None:
    async with fakes() as rig:
        watch = await rig.replicas.prefixes.watch("")
        asking = asyncio.ensure_future(watch.changes())
        await asyncio.sleep(0)
        rig.lose(1)
        with pytest.raises(SlowConsumer, match="subscribe again"):
            await asking
        with pytest.raises(SlowConsumer, match="subscribe again"):
            await watch.changes()
        watch.close()
        await until(lambda: rig.replicas.stats.replicas[1].ready)
        watch = await rig.replicas.prefixes.watch("")
        watch.close()


async def test_a_watch_whose_caller_leaves_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fakes() as rig:
        gate, second = asyncio.Event(), engines(rig)[1].prefixes

        async def late(salt: str) -> Any:
            await gate.wait()
            return type(second).watch(second, salt)

        monkeypatch.setattr(second, "watch", late)
        opening = asyncio.create_task(rig.replicas.prefixes.watch(""))
        await until(lambda: engines(rig)[0].prefixes.watches)
        opening.cancel()
        await asyncio.wait((opening,))
        gate.set()
        await until(lambda: all(each.closed for engine in engines(rig) for each in engine.prefixes.watches))


async def test_what_was_loaded_is_unloaded_also_where_one_engine_dies_of_that() -> None:
    async with fakes(3) as rig:
        first, second, third = engines(rig)
        third.refuse_with = Overloaded("no room", reason="ADAPTER_MEMORY")

        def dies(_name: str) -> int:
            raise EngineDead("it has ended")

        first.unload_adapter = dies  # type: ignore[method-assign]
        with pytest.raises(Overloaded, match="no room"):
            await rig.replicas.load_adapter("a", "path")
        assert not second.adapters


async def test_an_adapter_that_one_engine_has_evicted_can_be_loaded_there_again() -> None:
    async with fakes() as rig:
        await rig.replicas.load_adapter("a", "path")
        engines(rig)[1].adapters.clear()
        with pytest.raises(AdapterExists):
            await rig.replicas.load_adapter("a", "another path")
        assert [list(engine.adapters) for engine in engines(rig)] == [["a"], []]
        (load,) = await asyncio.gather(rig.replicas.load_adapter("a", "path"), return_exceptions=True)
        assert not isinstance(load, BaseException) and load.adapter.name == "a"
        assert [list(engine.adapters) for engine in engines(rig)] == [["a"], ["a"]]


async def test_figures_of_an_adapter_are_those_of_all_engines() -> None:
    async with fakes() as rig:
        await rig.replicas.load_adapter("a", "path")
        for place, engine in enumerate(engines(rig)):
            used = replace(engine.adapters["a"], live_requests=2 + place, idle_seconds=5.0 + place)
            engine.adapters["a"] = used
        (info,) = (await rig.replicas.list_adapters()).adapters
        assert (info.live_requests, info.idle_seconds) == (5, 5.0)


async def test_a_flush_of_one_tenant_leaves_what_is_known_of_others() -> None:
    async with fakes() as rig:
        rig.replicas._router.books[0].seen.add((1,))
        await rig.replicas.prefixes.flush("alice")
        assert len(rig.replicas._router.books[0].seen) == 1


async def test_without_a_prefix_cache_no_watch_is_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_salt: str) -> PrefixWatch:
        raise Unsupported("there is no prefix cache")

    async with fakes() as rig:
        monkeypatch.setattr(engines(rig)[1].prefixes, "watch", refuse)
        with pytest.raises(Unsupported):
            await rig.replicas.prefixes.watch("")
        await until(lambda: engines(rig)[0].prefixes.watches[0].closed)
