"""A front end and the engine's process, over a real socket pair: counts, places of tenants, and a connection lost."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from core.buggify import hooked
from core.errors import EngineDead
from core.types.io import GenerateRequest, Started
from core.types.sampling_params import SamplingParams
from service.calls.desk import LocalDesk
from service.config.server_config import ServerConfig
from service.engine.handle import EngineHandle
from service.frontends.host import FrontEndHost
from service.frontends.process import CountedCalls, serve
from service.frontends.remote_desk import RemoteDesk
from service.frontends.remote_engine import RemoteEngine
from service.frontends.wire import Kind
from service.limits.hold import Hold
from service.limits.work import Work
from service.metrics.rpc import RpcMetrics
from service.wire.position import Position
from tests.support.engines import started
from tests.support.fakes.fake_engine import FakeEngine
from tests.support.kept_server import small_engine
from tests.support.until import PATIENCE, until
from tests.support.within import within
from tests.unit.service.frontends.test_host import Desk


@dataclass
class Pair:
    """The two ends of the connection, and the metrics of the engine's process."""

    remote: RemoteEngine
    host: FrontEndHost
    desk: Desk
    registry: CollectorRegistry

    async def settle(self) -> None:
        """Return once the engine's process has read everything that was sent: frames are read in order."""
        await self.remote.tokenize("a")


@asynccontextmanager
async def paired(engine: Any, *, keeps: bool = False) -> AsyncIterator[Pair]:
    """`keeps`: with the desk of a server, which keeps streams."""
    loop, handle, registry, desk = asyncio.get_running_loop(), EngineHandle(), CollectorRegistry(), Desk()
    handle.engine = engine
    metrics = RpcMetrics(registry)
    door: Any = LocalDesk(handle, ServerConfig(), metrics) if keeps else desk
    host, remote = FrontEndHost(handle, door, metrics, lambda: None), RemoteEngine(1000)
    ours, theirs = socket.socketpair()
    await loop.create_unix_connection(lambda: host.link, sock=ours)
    await loop.create_unix_connection(lambda: remote.link, sock=theirs)
    try:
        yield Pair(remote, host, desk, registry)
    finally:
        remote.link.close()
        await until(lambda: host.lost)


async def test_what_a_front_end_counts_is_told_once() -> None:
    async with paired(FakeEngine()) as pair:
        counts = CountedCalls()
        for _ in range(3):
            counts.started("/a.Service/Call")
        counts.send(pair.remote)
        counts.started("/a.Service/Call")
        counts.send(pair.remote)
        counts.send(pair.remote)
        await pair.settle()
        started = pair.registry.get_sample_value("slipstream_rpc_started_total", {"method": "a.Service/Call"})
    assert started == 4


class Late:
    """What a stream tells comes a while after the reply that it is open, once `told` is set."""

    def __init__(self) -> None:
        self.told = asyncio.Event()
        self.told.set()

    def point(self, name: str) -> None:
        """Nothing happens here."""

    async def pause(self, name: str) -> None:
        await self.told.wait()


async def test_a_reader_that_has_everything_is_told_the_start_and_nothing_else() -> None:
    asked = GenerateRequest("mine", token_ids=(5,), sampling=SamplingParams(max_tokens=3, ignore_eos=True))
    async with started(small_engine()) as engine, paired(engine, keeps=True) as pair:
        desk = RemoteDesk(pair.remote, limited=False)
        stream = await desk.open(asked, None, Hold())
        first, *_ = [event async for event in stream]
        assert isinstance(first, Started)
        late = Late()
        with hooked(late):
            late.told.clear()
            again = await desk.attach("mine", {0: Position(finished=True)}, first.incarnation)
            assert [event async for event in again] == [first]
            late.told.set()


async def test_a_tenants_place_is_taken_and_given_back_in_the_engines_process() -> None:
    async with paired(FakeEngine()) as pair:
        limited, free = (RemoteDesk(pair.remote, limited=limited) for limited in (True, False))
        hold = await limited.enter("alice", None, Work(2, 10, 50))
        await limited.enter(None, None)
        await free.enter("bob", None)
        await pair.settle()
        assert pair.desk.left == []
        hold.saw_prompt(12)
        hold.use(5)
        for _ in range(2):
            hold.release()
        await pair.settle()
        assert (pair.desk.left, pair.desk.used) == (["alice"], [17]), "tokens that were used are told with it"
    assert pair.desk.left == ["alice"], "no place was taken for a caller without limits"


async def test_streams_end_when_the_engines_process_is_gone() -> None:
    sampling = SamplingParams(max_tokens=5000, temperature=0.0, ignore_eos=True)
    async with started(small_engine()) as engine, paired(engine) as pair:
        stream = await pair.remote.generate(GenerateRequest("mine", token_ids=(5, 6, 7), sampling=sampling))
        await anext(stream)
        pair.host.link.close()
        assert await pair.remote.closing, "the front end goes as well"
        async with within(2.0, "a stream of an engine that is gone ends"):
            with pytest.raises(EngineDead):
                async for _ in stream:
                    pass
        with pytest.raises(EngineDead):
            await pair.remote.tokenize("a")


async def test_a_front_end_that_is_closed_while_it_loads_closes_its_connection(
    config: Callable[..., ServerConfig],
) -> None:
    """Its server has no engine yet, and so none to stop."""
    loop, lost = asyncio.get_running_loop(), asyncio.Event()
    ours, theirs = socket.socketpair()
    host = FrontEndHost(EngineHandle(), {}, RpcMetrics(CollectorRegistry()), lost.set)  # type: ignore[arg-type]
    await loop.create_unix_connection(lambda: host.link, sock=ours)
    serving = asyncio.create_task(serve(config(), theirs))
    async with within(PATIENCE, "it listens"):
        await host.listening.wait()
    host.send(Kind.CLOSE, {"dead": False})
    async with within(PATIENCE, "it ends"):
        assert await serving == 0
        await lost.wait()
