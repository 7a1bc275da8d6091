"""Engines that fall silent: sent nothing, asked nothing twice, killed in the end."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from core.errors import StartupError
from core.types.control import Activity
from core.types.io import Started
from service.config.server_config import ServerConfig
from service.errors import EngineSilent, NotReady
from service.replicas import replica
from service.replicas.builder import replicated
from tests.support.until import PATIENCE, until
from tests.unit.service.replicas.rig import Rig, ask, read, replicas, tokens

LONG = 4000
SAME = tuple(range(5, 205))


async def test_silent_engines_are_sent_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica, "STALE_SECONDS", -1.0)
    async with replicas() as rig:
        told: list[Activity] = []
        rig.replicas.control.follow(told.append)
        for each in rig.replicas._replicas:
            each.look(0.0)
        assert told[-1] is Activity.REFUSING and not any(each.ready for each in rig.replicas.stats.replicas)
        with pytest.raises(NotReady):
            await rig.replicas.generate(ask((5, 6)))
        with pytest.raises(NotReady):
            await rig.replicas.tokenize("a")
        monkeypatch.setattr(replica, "STALE_SECONDS", 3.0)
        for each in rig.replicas._replicas:
            each.look(0.0)
        assert told[-1] is Activity.SERVING and len(rig.processes) == 2
        assert len(tokens(await read(rig.replicas, ask((5, 6))))) == 4


async def test_one_that_stays_silent_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with replicas() as rig:
        # Of those that start, more is borne.
        monkeypatch.setattr(replica, "START_SECONDS", -1.0)
        rig.replicas._replicas[1].look(0.0)
        monkeypatch.setattr(replica, "START_SECONDS", 120.0)
        assert rig.processes[1].returncode is None and rig.replicas.stats.replicas[1].ready
        monkeypatch.setattr(replica, "DEAD_SECONDS", -1.0)
        rig.replicas._replicas[1].look(0.0)
        monkeypatch.setattr(replica, "DEAD_SECONDS", 30.0)
        await until(lambda: len(rig.processes) == 3 and rig.replicas.stats.replicas[1].ready)
        assert rig.processes[1].returncode == -9 and rig.processes[0].returncode is None


async def test_calls_that_a_silent_engine_does_not_answer_go_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    async with replicas() as rig:
        gate = asyncio.Event()
        frozen = rig.engines[0]
        for method in ("generate", "tokenize"):
            monkeypatch.setattr(frozen, method, lambda *_, **__: gate.wait())
        asking = asyncio.create_task(read(rig.replicas, ask((5, 6), request_id="r")))
        words = asyncio.create_task(rig.replicas.tokenize("a"))
        await until(lambda: rig.replicas._replicas[0].engine._replies)
        monkeypatch.setattr(replica, "STALE_SECONDS", -1.0)
        rig.replicas._replicas[0].look(0.0)
        monkeypatch.setattr(replica, "STALE_SECONDS", 3.0)
        assert len(tokens(await asyncio.wait_for(asking, PATIENCE))) == 4 and await asyncio.wait_for(words, PATIENCE)
        gate.set()
        assert len(rig.processes) == 2 and not rig.replicas.live_requests


async def test_what_a_silent_engine_has_cannot_be_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    async with replicas() as rig:
        stream = await rig.replicas.generate(ask((5, 6), LONG, request_id="r"))
        gate = asyncio.Event()
        monkeypatch.setattr(rig.engines[0], "abort", lambda _: gate.wait())
        aborting = asyncio.create_task(rig.replicas.abort("r"))
        await until(lambda: rig.replicas._replicas[0].engine._replies)
        monkeypatch.setattr(replica, "STALE_SECONDS", -1.0)
        rig.replicas._replicas[0].look(0.0)
        with pytest.raises(EngineSilent):
            await aborting
        gate.set()
        await stream.aclose()


async def test_a_request_over_which_two_engines_fell_silent_is_sent_to_no_third(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with replicas(3) as rig:
        gate, asked = asyncio.Event(), []

        def never(place: int) -> Any:
            async def wait(_request: Any) -> None:
                asked.append(place)
                await gate.wait()

            return wait

        for place, engine in rig.engines.items():
            monkeypatch.setattr(engine, "generate", never(place))
        asking = asyncio.create_task(rig.replicas.generate(ask((5, 6))))
        for count in (1, 2):
            await until(lambda count=count: len(asked) == count)
            monkeypatch.setattr(replica, "STALE_SECONDS", -1.0)
            rig.replicas._replicas[asked[-1]].look(0.0)
            monkeypatch.setattr(replica, "STALE_SECONDS", 3.0)
        with pytest.raises(EngineSilent):
            await asyncio.wait_for(asking, PATIENCE)
        assert len(asked) == 2
        gate.set()


async def test_streams_of_a_silent_engine_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with replicas() as rig:
        stream = await rig.replicas.generate(ask((5, 6), 400))
        assert isinstance(await anext(stream), Started)
        monkeypatch.setattr(replica, "STALE_SECONDS", -1.0)
        for each in rig.replicas._replicas:
            each.look(0.0)
        assert len(tokens([event async for event in stream])) == 400


async def test_an_engine_that_freezes_in_the_first_start_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica, "START_SECONDS", 0.5)
    gate, rig, config = threading.Event(), Rig(), ServerConfig.of(data_parallel=2)

    def make(_config: Any) -> Any:
        gate.wait(PATIENCE)
        raise StartupError("too late")

    rig.make = make
    monkeypatch.setattr("service.replicas.process._tell", lambda *_: asyncio.sleep(0))
    try:
        with pytest.raises(StartupError, match="was ended by SIGKILL before it could serve") as failed:
            await asyncio.wait_for(replicated(config, rig.spawn)(config.engine_config(), None).start(), PATIENCE)
    finally:
        gate.set()
    assert failed.value.exit_code == 1
    assert all(process.returncode == -9 for process in rig.processes)
