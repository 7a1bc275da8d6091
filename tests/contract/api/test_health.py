"""`grpc.health.v1` in every state: liveness is the process, readiness is the will to admit."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from service.client import CallFailed, SlipstreamClient
from service.config.server_config import ServerConfig
from service.pb.slipstream.v1 import inference_pb2 as pb
from service.server.server import Server
from service.servicers.health import LIVENESS, READINESS
from tests.support.fakes.fake_engine import FakeEngine, held
from tests.support.scorecard import Scorecard
from tests.support.servers import Serve, listening
from tests.support.until import PATIENCE

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
BOTH = ["SERVING", "SERVING"]
LIVES_ONLY = ["SERVING", "NOT_SERVING"]
"""Liveness and readiness by name."""


def health(channel: grpc.aio.Channel) -> Any:
    return health_pb2_grpc.HealthStub(channel)


async def check(channel: grpc.aio.Channel) -> tuple[int, int]:
    """Liveness and readiness."""
    stub = health(channel)
    services = (LIVENESS, READINESS)
    answers = [await stub.Check(health_pb2.HealthCheckRequest(service=service)) for service in services]
    return answers[0].status, answers[1].status


def _named(states: tuple[int, int]) -> list[str]:
    return [health_pb2.HealthCheckResponse.ServingStatus.Name(state) for state in states]


async def test_while_loading_it_lives_but_is_not_ready(
    config: Callable[..., ServerConfig], scorecard: Scorecard
) -> None:
    release, engine = threading.Event(), FakeEngine()

    def build(*_: object) -> FakeEngine:
        assert release.wait(PATIENCE)
        return engine

    async with (
        listening(Server(config(), build)) as server,
        SlipstreamClient(f"127.0.0.1:{server.port}") as client,
    ):
        loading = asyncio.create_task(server.load())
        scorecard(24, "loading: liveness, readiness", _named(await check(client.channel)), equals=LIVES_ONLY)
        info = await client.stub.GetServerInfo(pb.GetServerInfoRequest())
        assert info.state == pb.SERVER_STATE_STARTING
        with pytest.raises(CallFailed) as failed:
            await client.complete("hi")
        assert (failed.value.code.name, failed.value.reason) == ("UNAVAILABLE", "STARTING")
        release.set()
        await loading
        scorecard(24, "loaded: liveness, readiness", _named(await check(client.channel)), equals=BOTH)


async def test_list_and_unknown_services(serve: Serve) -> None:
    async with serve() as serving:
        stub = health(serving.client.channel)
        listed = await stub.List(health_pb2.HealthListRequest())
        assert {name: answer.status for name, answer in listed.statuses.items()} == {
            LIVENESS: SERVING,
            READINESS: SERVING,
        }
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await stub.Check(health_pb2.HealthCheckRequest(service="nonesuch"))
        assert failed.value.code() is grpc.StatusCode.NOT_FOUND
        watch = stub.Watch(health_pb2.HealthCheckRequest(service="nonesuch"))
        assert (await watch.read()).status == UNKNOWN


async def test_watch_tells_of_the_drain_and_then_ends(serve: Serve, scorecard: Scorecard) -> None:
    gate = asyncio.Event()
    async with serve(FakeEngine(held(gate))) as serving:
        stub = health(serving.client.channel)
        watches = {
            service: stub.Watch(health_pb2.HealthCheckRequest(service=service)) for service in (LIVENESS, READINESS)
        }
        for watch in watches.values():
            assert (await watch.read()).status == SERVING
        running = asyncio.create_task(serving.client.complete("hi"))
        await serving.engine.stream_number(1)
        # Behind the linger this port is closed, and the health port answers: tests/contract/api/test_health_port.py.
        draining = asyncio.create_task(serving.server.drain(0.5, PATIENCE))
        try:
            assert (await watches[READINESS].read()).status == NOT_SERVING
            states = await check(serving.client.channel)
        except grpc.aio.AioRpcError as gone:
            pytest.fail(f"readiness fell only when the port was closed: {gone.details()}")
        scorecard(24, "draining: liveness, readiness", _named(states), equals=LIVES_ONLY)
        gate.set()
        assert len((await running)[0].token_ids) == 8
        assert await draining == 0
        for watch in watches.values():
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await watch.read()
            assert CallFailed(ended.value).reason == "DRAINING", "ended by us, not by the transport"


async def test_readiness_survives_overload(serve: Serve, scorecard: Scorecard) -> None:
    gate = asyncio.Event()
    async with serve(FakeEngine(held(gate)), max_concurrent_requests=1, admission_wait=0.05) as serving:
        running = asyncio.create_task(serving.client.complete("hi"))
        await serving.engine.stream_number(1)
        with pytest.raises(CallFailed) as failed:
            await serving.client.complete("hi")
        assert failed.value.reason == "CONCURRENCY_LIMIT"
        # Load is not illness.
        scorecard(24, "full: liveness, readiness", _named(await check(serving.client.channel)), equals=BOTH)
        gate.set()
        await running
