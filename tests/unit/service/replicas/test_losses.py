"""Engines that end, fall silent or cannot start: what is lost with them, and what goes on."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from core.engine.api import EngineState
from core.errors import EngineDead, StartupError
from core.types.control import Activity
from core.types.io import Delta
from core.types.streams import StreamInfo
from service.config.server_config import ServerConfig
from service.errors import NotReady
from service.replicas import replica
from service.replicas.builder import replicated
from tests.support.kept_server import small_engine
from tests.support.until import PATIENCE, until
from tests.unit.service.replicas.rig import Rig, ask, read, replicas, tokens

LONG = 4000
SAME = tuple(range(5, 205))


async def test_an_engine_that_ends_takes_its_own_streams_along_and_comes_back() -> None:
    async with replicas() as rig:
        streams = [await rig.replicas.generate(ask((place + 5, 6), LONG)) for place in range(4)]
        for stream in streams:
            while not isinstance(await anext(stream), Delta):
                pass
        counted = rig.replicas.stats.generation_tokens
        told: list[Activity] = []
        rig.replicas.control.follow(told.append)
        rig.lose(0)
        outcomes = []
        for stream in streams:
            try:
                async with asyncio.timeout(0.3):
                    outcomes.append([event async for event in stream])
            except EngineDead as error:
                outcomes.append(error)
            except TimeoutError:
                outcomes.append("goes on")
                await stream.aclose()
        assert sorted(str(type(each).__name__) for each in outcomes) == ["EngineDead", "EngineDead", "str", "str"]
        assert len(rig.replicas.open_streams) == 0
        await until(lambda: len(rig.processes) == 3 and all(each.ready for each in rig.replicas.stats.replicas))
        assert rig.replicas.stats.generation_tokens >= counted, "a counter never falls"
        assert [each.restarts for each in rig.replicas.stats.replicas] == [1, 0]
        assert told == [Activity.SERVING], "one was always there"
        found = await asyncio.gather(*(read(rig.replicas, ask((place, 9), 3)) for place in range(5, 9)))
        assert [len(tokens(each)) for each in found] == [3] * 4
        assert rig.replicas.state is EngineState.READY


async def test_without_an_engine_requests_are_refused_and_the_server_is_not_ready() -> None:
    async with replicas() as rig:
        told: list[Activity] = []
        rig.replicas.control.follow(told.append)
        rig.refuse.update((0,))
        rig.lose(0)
        rig.refuse.update((1,))
        rig.lose(1)
        await until(lambda: told[-1] is Activity.REFUSING)
        with pytest.raises((NotReady, EngineDead)):
            await rig.replicas.generate(ask((5, 6)))
        cause = await asyncio.wait_for(rig.replicas.wait_dead(), PATIENCE)
        assert isinstance(cause, EngineDead), "neither can be started"
        assert rig.replicas.state is EngineState.DEAD
        with pytest.raises(EngineDead):
            await rig.replicas.generate(ask((5, 6)))


async def test_a_server_is_dead_only_when_no_engine_is_being_started(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    async with replicas() as rig:
        rig.refuse.add(0)
        rig.lose(0)
        await until(lambda: rig.replicas._replicas[0].failed)
        rig.refuse.clear()

        def slowly(_config: Any) -> Any:
            gate.wait(PATIENCE)
            return small_engine()

        rig.make = slowly
        await until(lambda: len(rig.processes) == 3)
        rig.refuse.add(1)
        rig.lose(1)
        await until(lambda: rig.replicas._replicas[1].failed)
        assert rig.replicas.state is EngineState.READY, "one is on its way"
        gate.set()
        await until(lambda: rig.replicas.stats.replicas[0].ready)
        assert len(tokens(await read(rig.replicas, ask((5, 6))))) == 4
        assert rig.replicas.state is EngineState.READY
        # One that came back has not failed, so the other's failures alone are not the end.
        await until(lambda: rig.replicas._replicas[1].restarts > 3)
        assert rig.replicas.state is EngineState.READY


async def test_an_error_of_any_kind_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with replicas() as rig:
        start, failed = replica.Replica.start, []

        async def failing(self: replica.Replica) -> None:
            if not failed:
                failed.append(1)
                raise RuntimeError("can't start new thread")
            await start(self)

        monkeypatch.setattr(replica.Replica, "start", failing)
        rig.lose(1)
        await until(lambda: failed and rig.replicas.stats.replicas[1].ready)
        assert rig.replicas.stats.replicas[1].restarts == 2


async def test_what_was_lost_twice_still_counts_and_holds_nothing() -> None:
    async with replicas(1) as rig:
        for lost in (1, 2):
            await read(rig.replicas, ask((5, 6), 7))
            stream = await rig.replicas.generate(ask((5, 6), LONG))
            await until(lambda: rig.replicas.stats.running == 1)
            await until(lambda lost=lost: rig.replicas.stats.finished["length"] == lost)
            rig.lose(0)
            with pytest.raises(EngineDead):
                async for _ in stream:
                    pass
            await until(lambda: rig.replicas.stats.replicas[0].ready)
            stats = rig.replicas.stats
            assert stats.finished["length"] == lost and stats.generation_tokens >= 7 * lost
            assert stats.running == 0 and sum(pool.used for pool in stats.pools) == 0


async def test_an_engine_that_crashes_often_is_started_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def noted(seconds: float) -> None:
        if seconds in (0.11, 0.22, 0.44, 0.88):
            pauses.append(seconds)
            seconds = 0.0
        await sleep(seconds)

    monkeypatch.setattr(replica, "FIRST_BACKOFF", 0.11)
    monkeypatch.setattr(replica, "LONGEST_BACKOFF", 0.44)
    async with replicas() as rig:
        monkeypatch.setattr(replica.asyncio, "sleep", noted)
        for lost in range(1, 5):
            rig.lose(0)
            await until(lambda lost=lost: len(rig.processes) == 2 + lost and rig.replicas.stats.replicas[0].ready)
        monkeypatch.setattr(replica, "LONG_ENOUGH", 0.0)
        rig.lose(0)
        await until(lambda: len(rig.processes) == 7 and rig.replicas.stats.replicas[0].ready)
    assert pauses == [0.11, 0.22, 0.44, 0.44, 0.11]


async def test_a_stop_while_one_is_starting_leaves_nothing() -> None:
    gate = threading.Event()
    async with replicas() as rig:

        def slowly(_config: Any) -> Any:
            gate.wait(PATIENCE)
            return small_engine()

        rig.make = slowly
        rig.lose(0)
        await until(lambda: len(rig.processes) == 3)
        await rig.replicas.stop()
        gate.set()
        assert [process.returncode for process in rig.processes] == [-9, 0, -9]


@pytest.mark.parametrize("ends", [True, False], ids=["ends", "is cancelled"])
async def test_a_start_that_does_not_succeed_leaves_nothing(ends: bool) -> None:
    gate, rig, config = threading.Event(), Rig(), ServerConfig.of(data_parallel=2)

    def make(_config: Any) -> Any:
        gate.wait(PATIENCE)
        return small_engine()

    rig.make = make
    starting = asyncio.create_task(replicated(config, rig.spawn)(config.engine_config(), None).start())
    await until(lambda: len(rig.processes) == 2)
    if ends:
        rig.lose(1)
    else:
        starting.cancel()
    await asyncio.wait((starting,), timeout=PATIENCE)
    gate.set()
    assert starting.cancelled() or isinstance(starting.exception(), StartupError)
    assert [process.returncode for process in rig.processes] == [-9, -9]


async def test_an_engine_that_ends_while_all_drain_is_not_started_again() -> None:
    async with replicas() as rig:
        streams = [await rig.replicas.generate(ask((5 + place, 6), LONG)) for place in range(2)]
        draining = asyncio.create_task(rig.replicas.drain(0.4))
        await until(lambda: rig.replicas.state is EngineState.DRAINING)
        rig.lose(0)
        assert await asyncio.wait_for(draining, PATIENCE) == 1
        assert len(rig.processes) == 2
        for stream in streams:
            await stream.aclose()


async def test_while_one_serves_the_others_are_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica, "LONGEST_BACKOFF", 0.01)
    async with replicas() as rig:
        rig.refuse.add(0)
        rig.lose(0)
        await until(lambda: rig.replicas.stats.replicas[0].restarts > 3)
        assert tokens(await read(rig.replicas, ask((5, 6), 3)))
        rig.refuse.clear()
        await until(lambda: rig.replicas.stats.replicas[0].ready)
        assert rig.replicas.state is EngineState.READY


async def test_one_that_cannot_start_ends_all_with_its_reason() -> None:
    rig, config = Rig(), ServerConfig.of(data_parallel=2)
    started = asyncio.Event()

    def make(_config: Any) -> Any:
        if len(rig.processes) == 2 and not started.is_set():
            started.set()
            raise StartupError("the disk is on fire")
        return small_engine()

    rig.make = make
    with pytest.raises(StartupError, match="on fire") as failed:
        await replicated(config, rig.spawn)(config.engine_config(), None).start()
    assert failed.value.exit_code == 2
    assert all(process.returncode is not None for process in rig.processes)


async def test_a_request_that_an_engine_dies_of_is_sent_to_no_other() -> None:
    async with replicas(3) as rig:
        for place, engine in rig.engines.items():

            async def poisoned(_request: Any, place: int = place) -> None:
                rig.lose(place)
                await asyncio.Event().wait()

            engine.generate = poisoned  # type: ignore[method-assign]
        with pytest.raises(EngineDead):
            await asyncio.wait_for(rig.replicas.generate(ask((5, 6))), PATIENCE)
        await until(lambda: len(rig.processes) == 4 and all(each.ready for each in rig.replicas.stats.replicas))
        assert sum(each.restarts for each in rig.replicas.stats.replicas) == 1


async def test_streams_that_end_others_as_they_are_lost() -> None:
    """As kept streams do, whose memory is short: what one leaves unread makes room at another's cost."""
    async with replicas() as rig:
        for place in range(6):
            await rig.replicas.generate(ask((5 + place, 6), LONG))
        first, engine = rig.replicas._requests, rig.replicas.ready()[0]
        mine: Any = [request for request, on in first._open.values() if on is engine]
        assert len(mine) == 3
        mine[0].watch(lambda: mine[1].give_way() if mine[0].over else None)
        rig.lose(0)
        await until(lambda: all(stream.over for stream in mine))
        with pytest.raises(EngineDead):
            async for _ in mine[2]:
                pass
        assert rig.replicas.live_requests == 3
        left = rig.replicas.ready()[1]
        others = [request for request, on in first._open.values() if on is left]
        numbers = list(left._streams)
        others[0].watch(lambda: left.end(numbers[1]) if others[0].over else None)
        try:
            left.fail_streams(EngineDead("all of them"))
        except RuntimeError as error:
            raise AssertionError("the other streams were not reached") from error


async def test_tokens_of_a_stream_that_is_lost_are_told() -> None:
    async with replicas() as rig:
        told: list[StreamInfo] = []
        rig.replicas.open_streams.on_end(told.append)
        streams = [await rig.replicas.generate(ask((5 + place, 6), LONG)) for place in range(2)]
        counts = [0, 0]
        for place, stream in enumerate(streams):
            while not isinstance(event := await anext(stream), Delta):
                pass
            counts[place] += len(event.token_ids)
        rig.lose(0)
        for place, stream in enumerate(streams):
            try:
                async with asyncio.timeout(0.3):
                    async for event in stream:
                        if isinstance(event, Delta):
                            counts[place] += len(event.token_ids)
            except EngineDead as lost:
                assert lost.message == "the engine that had this request failed; send it again"
            except TimeoutError:
                await stream.aclose()
        await until(lambda: len(told) == 2)
        lost, closed = told
        assert (lost.prompt_tokens, lost.state) == (2, "decode") and lost.output_tokens in counts
        assert closed.output_tokens >= 1 and closed.request_id != lost.request_id


async def test_tokens_of_a_request_that_ended_before_its_engine_did_count_once() -> None:
    async with replicas() as rig:
        told: list[StreamInfo] = []
        rig.replicas.open_streams.on_end(told.append)
        stream = await rig.replicas.generate(ask((5, 6), LONG, request_id="r"))
        # As when the last events are still on their way.
        rig.replicas.open_streams.ended(stream.info())
        rig.lose(0)
        with pytest.raises(EngineDead):
            async for _ in stream:
                pass
        assert [info.request_id for info in told] == ["r"]
        await until(lambda: rig.replicas.stats.replicas[0].ready)
        assert len(tokens(await read(rig.replicas, ask((5, 6), 3, request_id="r")))) == 3
        await until(lambda: [info.request_id for info in told] == ["r", "r"])


async def test_what_has_ended_runs_nothing() -> None:
    async with replicas() as rig:
        streams = [await rig.replicas.generate(ask((5 + place, 6), LONG)) for place in range(2)]
        await until(lambda: all(each.running for each in rig.replicas.stats.replicas))
        rig.refuse.add(0)
        rig.lose(0)
        await until(lambda: not rig.replicas.stats.replicas[0].ready)
        gone = rig.replicas.stats.replicas[0]
        assert (gone.running, gone.waiting, gone.kv_used, gone.kv_capacity) == (0, 0, 0, 0)
        for stream in streams:
            await stream.aclose()
