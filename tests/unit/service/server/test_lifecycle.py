"""How a server goes away: the order of a drain, its bounds, a second signal, a dead engine, and the exit codes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Self

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from core.errors import ModelLoadError, StartupError
from service.cli.lifecycle import run
from service.client import CallFailed, SlipstreamClient
from service.config.server_config import ServerConfig
from service.pb.slipstream.v1 import inference_pb2 as pb
from service.server.server import Server
from service.servicers.health import READINESS
from tests.support.fakes.fake_engine import FakeEngine, held
from tests.support.servers import listening
from tests.support.until import PATIENCE

LINGER = 1.5
"""Within it a busy machine has to tell of the drain and take one more call."""


@dataclass
class Process:
    """A server under `lifecycle.run`, as the command line runs it, with a client in front of it."""

    server: Server
    engine: FakeEngine
    client: SlipstreamClient
    exit: asyncio.Task[int]

    async def code(self) -> int:
        async with asyncio.timeout(PATIENCE):
            return await self.exit


def send(number: signal.Signals) -> None:
    """A real signal to this process, whose handlers the server has taken over."""
    os.kill(os.getpid(), number)


Start = Callable[..., object]


@pytest.fixture
def start(config: Callable[..., ServerConfig]) -> Start:
    @asynccontextmanager
    async def run_one(engine: FakeEngine, **changes: object) -> AsyncIterator[Process]:
        server = Server(config(**changes), lambda *_: engine)
        ready = asyncio.Event()
        exiting = asyncio.create_task(run(server, lambda _: ready.set()))
        async with asyncio.timeout(PATIENCE):
            await ready.wait()
        async with SlipstreamClient(f"127.0.0.1:{server.port}") as client:
            yield Process(server, engine, client, exiting)
        assert exiting.done(), "every test here ends the server"

    return run_one


async def readiness_lost(process: Process) -> None:
    """Wait until the health service says so, as a load balancer would."""
    watch = health_pb2_grpc.HealthStub(process.client.channel).Watch(health_pb2.HealthCheckRequest(service=READINESS))
    async with asyncio.timeout(PATIENCE):
        async for answer in watch:
            if answer.status == health_pb2.HealthCheckResponse.NOT_SERVING:
                break
    watch.cancel()
    info = await process.client.stub.GetServerInfo(pb.GetServerInfoRequest())
    assert info.state == pb.SERVER_STATE_DRAINING


async def test_sigterm_finishes_streams_keeps_taking_new_ones_for_the_linger_and_exits_zero(start: Start) -> None:
    gate = asyncio.Event()
    async with start(FakeEngine(held(gate)), drain_linger=LINGER, drain_grace=PATIENCE) as process:
        early = asyncio.create_task(process.client.complete("hi"))
        await process.engine.stream_number(1)
        send(signal.SIGTERM)
        await readiness_lost(process)
        late = asyncio.create_task(process.client.complete("hi"))
        await process.engine.stream_number(2)
        gate.set()
        assert [len((await task)[0].token_ids) for task in (early, late)] == [8, 8]
        assert await process.code() == 0
        assert process.engine.stopped == 1
        assert len(process.server.tracker) == 0


async def test_after_the_linger_nobody_is_let_in_and_after_the_grace_the_rest_is_cut(start: Start) -> None:
    async with start(FakeEngine(held(asyncio.Event(), after=3)), drain_linger=LINGER, drain_grace=0.5) as process:
        events = process.client.generate("hi")
        received = [await anext(events) for _ in range(3)]
        send(signal.SIGTERM)
        await readiness_lost(process)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            while True:
                await process.client.stub.Tokenize(pb.TokenizeRequest(text="hi"), timeout=PATIENCE)
        # CANCELLED: it was on its way when the server said that it goes.
        assert refused.value.code().name in ("UNAVAILABLE", "CANCELLED"), "the port is closed"
        with pytest.raises(CallFailed) as cut:
            received += [event async for event in events]
        assert (cut.value.code.name, cut.value.reason, cut.value.tokens_emitted) == ("UNAVAILABLE", "DRAINING", 3)
        assert len(received) == 3
        assert await process.code() == 0
        assert all(stream.closed.is_set() for stream in process.engine.streams)


async def test_ctrl_c_does_not_linger(start: Start) -> None:
    async with start(FakeEngine(), drain_linger=3600.0) as process:
        await process.client.complete("hi")
        send(signal.SIGINT)
        assert await process.code() == 0


async def test_a_hang_up_lingers_as_sigterm_does_and_one_that_was_ignored_stays_so(start: Start) -> None:
    gate = asyncio.Event()
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        async with start(FakeEngine(held(gate)), drain_linger=LINGER, drain_grace=PATIENCE) as process:
            early = asyncio.create_task(process.client.complete("hi"))
            await process.engine.stream_number(1)
            send(signal.SIGHUP)
            assert (await process.client.stub.GetServerInfo(pb.GetServerInfoRequest())).state == pb.SERVER_STATE_READY
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN, "nohup asked for that"
            send(signal.SIGTERM)
            gate.set()
            assert len((await early)[0].token_ids) == 8
            assert await process.code() == 0
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        async with start(FakeEngine(), drain_linger=LINGER) as process:
            send(signal.SIGHUP)
            await readiness_lost(process)
            assert len((await process.client.complete("hi"))[0].token_ids) == 8
            assert await process.code() == 0
    finally:
        signal.signal(signal.SIGHUP, before)


async def test_a_second_signal_ends_it_at_once(start: Start) -> None:
    async with start(FakeEngine(held(asyncio.Event())), drain_linger=3600.0) as process:
        running = asyncio.create_task(process.client.complete("hi"))
        await process.engine.stream_number(1)
        send(signal.SIGTERM)
        await readiness_lost(process)
        send(signal.SIGTERM)
        assert await process.code() == 128 + signal.SIGTERM
        with pytest.raises(CallFailed) as cut:
            await running
        assert cut.value.code.name == "UNAVAILABLE"
        assert process.engine.streams[0].closed.is_set(), "finally blocks ran"


@pytest.mark.parametrize("draining", [False, True])
async def test_a_dead_engine_ends_streams_with_a_reason_and_the_process_with_one(start: Start, draining: bool) -> None:
    async with start(FakeEngine(held(asyncio.Event())), drain_linger=LINGER, drain_grace=3600.0) as process:
        running = [asyncio.create_task(process.client.complete("hi")) for _ in range(5)]
        await process.engine.stream_number(5)
        if draining:
            send(signal.SIGTERM)
            await readiness_lost(process)
        process.engine.kill(RuntimeError("device lost"))
        for task in running:
            with pytest.raises(CallFailed) as failed:
                await task
            assert (failed.value.code.name, failed.value.reason) == ("UNAVAILABLE", "ENGINE_DEAD")
        assert await process.code() == 1


async def test_an_engine_that_hangs_in_its_drain_does_not_hold_up_the_exit(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def drain(timeout: float) -> int:
        await asyncio.Event().wait()
        return 0

    monkeypatch.setattr("service.server.server.DRAIN_MARGIN_SECONDS", 0.1)
    monkeypatch.setattr("service.server.served_engine.DRAIN_MARGIN_SECONDS", 0.1)
    engine = FakeEngine()
    monkeypatch.setattr(engine, "drain", drain)
    async with start(engine, drain_grace=0.1) as process:
        send(signal.SIGTERM)
        assert await process.code() == 0
        assert engine.stopped == 1


async def test_an_engine_that_cannot_be_built_ends_with_its_own_error(config: Callable[..., ServerConfig]) -> None:
    def build(*_: object) -> FakeEngine:
        raise ModelLoadError("weights are bad")

    server = Server(config(), build)
    with pytest.raises(ModelLoadError, match="weights are bad"):
        await run(server, lambda _: None)


async def test_an_engine_that_cannot_start_is_neither_asked_nor_stopped(config: Callable[..., ServerConfig]) -> None:
    class Unstarted(FakeEngine):
        async def start(self) -> Self:
            raise StartupError("no threads left")

    engine = Unstarted()
    server = Server(config(), lambda *_: engine)
    with pytest.raises(StartupError, match="no threads left"):
        await run(server, lambda _: None)
    assert server.handle.engine is None and engine.stopped == 0


async def test_a_signal_while_loading_ends_it_without_waiting(config: Callable[..., ServerConfig]) -> None:
    import threading

    entered, release = threading.Event(), threading.Event()

    def build(*_: object) -> FakeEngine:
        entered.set()
        release.wait(PATIENCE)
        raise AssertionError("nobody waits for this engine")

    server = Server(config(), build)
    exiting = asyncio.create_task(run(server, lambda _: None))
    assert await asyncio.to_thread(entered.wait, PATIENCE)
    send(signal.SIGTERM)
    async with asyncio.timeout(PATIENCE):
        assert await exiting == 0
    release.set()


async def test_what_loads_while_its_server_drains_does_not_become_ready(config: Callable[..., ServerConfig]) -> None:
    """A front end that was started again knows of a drain before its engine."""
    async with listening(Server(config(), lambda *_: FakeEngine())) as server:
        server.refuse_readiness()
        await server.load()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=READINESS))
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_a_second_signal_does_not_wait_for_an_engine_that_hangs(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = asyncio.Event()
    monkeypatch.setattr("service.server.served_engine.ENGINE_STOP_SECONDS", 3600.0)
    monkeypatch.setattr("service.server.served_engine.HURRIED_STOP_SECONDS", 0.1)
    engine = FakeEngine(held(asyncio.Event()))
    monkeypatch.setattr(engine, "stop", hangs.wait)
    async with start(engine, drain_linger=3600.0) as process:
        send(signal.SIGTERM)
        await readiness_lost(process)
        send(signal.SIGTERM)
        ended, _ = await asyncio.wait([process.exit], timeout=PATIENCE)
        hangs.set()
        assert ended, "it waits for the engine"
        assert await process.code() == 128 + signal.SIGTERM
