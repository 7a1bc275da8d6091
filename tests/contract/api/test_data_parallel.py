"""A server of several engines at its door: calls, kept streams, metrics and readiness are those of a server of one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from service.client import CallFailed, SlipstreamClient
from service.config.server_config import ServerConfig
from service.frontends.group import FrontEndGroup
from service.replicas import replica
from service.replicas.builder import replicated
from service.server.server import Server
from service.servicers.health import READINESS
from tests.support.kept_server import GREEDY, QUICK, Seen, kept_server, uninterrupted
from tests.support.servers import loaded
from tests.support.until import until
from tests.system.test_attach import begun, rest
from tests.unit.service.replicas.rig import Rig

PATIENCE = 20.0


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has ended starts again at once."""
    monkeypatch.setattr(replica, "FIRST_BACKOFF", 0.01)


@asynccontextmanager
async def serving(**settings: Any) -> AsyncIterator[tuple[Any, Rig, SlipstreamClient]]:
    """A server with two engines over the emulated device, and a client that comes back at once."""
    rig, defaults = Rig(), {"port": 0, "metrics_port": 0, "drain_linger": 0.0, "data_parallel": 2}
    config = ServerConfig.of(**(defaults | settings))
    make = FrontEndGroup if config.frontends else Server
    async with loaded(make(config, replicated(config, rig.spawn))) as server:
        async with SlipstreamClient(f"127.0.0.1:{server.port}", QUICK) as client:
            yield server, rig, client


def sample(server: Any, series: str, **labels: str) -> float:
    """The value of a metric."""
    return server.metrics.registry.get_sample_value(series, labels) or 0.0


@pytest.mark.parametrize("frontends", [0, 1])
async def test_streams_are_those_of_a_server_of_one(frontends: int) -> None:
    options: list[dict[str, Any]] = [
        {"max_tokens": 30, **GREEDY},
        {"max_tokens": 20, "n": 3, **GREEDY},
        {"max_tokens": 20, "logprobs": True, "top_logprobs": 2, **GREEDY},
        {"max_tokens": 300, "resumable": True, **GREEDY},
    ]
    async with kept_server() as one, one.client() as straight:
        wanted = [await uninterrupted(straight, [5, 6, place], **each) for place, each in enumerate(options * 2)]
    async with serving(frontends=frontends) as (server, _rig, client), asyncio.timeout(2 * PATIENCE):
        asking = (uninterrupted(client, [5, 6, place], **each) for place, each in enumerate(options * 2))
        found = await asyncio.gather(*asking)
        assert [seen.outcome for seen in found] == [seen.outcome for seen in wanted]
        sent = [sample(server, "slipstream_replica_requests_total", replica=name) for name in "01"]
        assert sum(sent) == len(wanted) and min(sent) >= 1


@pytest.mark.parametrize("frontends", [0, 1])
async def test_a_stream_whose_call_is_dropped_is_kept_and_brings_the_rest(frontends: int) -> None:
    async with serving(frontends=frontends) as (server, _rig, client), asyncio.timeout(2 * PATIENCE):
        wanted = await uninterrupted(client, [5, 6, 7, 8], max_tokens=300, **GREEDY)
        for place in range(3):
            call, seen = await begun(client, f"s{place}", 300)
            call.cancel()
            seen = await rest(client, f"s{place}", seen)
            assert seen.outcome == wanted.outcome
        await until(lambda: not server.engine.live_requests, PATIENCE)


async def test_a_stream_of_an_engine_that_ends_says_so_and_another_brings_it_anew() -> None:
    async with serving() as (server, rig, client), asyncio.timeout(2 * PATIENCE):
        streams = [await begun(client, f"s{place}", 6000) for place in range(4)]
        rig.lose(0)
        codes: dict[str, list[str]] = {"lost": [], "on": []}
        for place, (call, seen) in enumerate(streams):
            call.cancel()
            try:
                async with asyncio.timeout(0.5):
                    await rest(client, f"s{place}", seen)
            except CallFailed as failed:
                codes["lost"].append(f"{failed.code.name} {failed.reason}")
            except TimeoutError:
                codes["on"].append(f"s{place}")
                await client.abort(f"s{place}")
        assert codes["lost"] == ["UNAVAILABLE ENGINE_DEAD"] * 2 and len(codes["on"]) == 2
        await until(lambda: sample(server, "slipstream_replica_ready", replica="0") == 1.0, PATIENCE)
        assert sample(server, "slipstream_replica_restarts_total", replica="0") == 1.0
        seen = await uninterrupted(client, [5, 6], max_tokens=5, **GREEDY)
        assert isinstance(seen, Seen) and seen.ids


async def test_figures_are_sums_and_each_engine_has_its_own() -> None:
    async with serving() as (server, _rig, client), asyncio.timeout(2 * PATIENCE):
        info = await client.server_info()
        assert info.max_running_requests == 2 * 256 and info.max_queued_requests == 2 * 1024
        assert sample(server, "slipstream_requests_waiting_limit") == 2 * 1024
        streams = [await begun(client, f"s{place}", 6000) for place in range(4)]
        await until(lambda: sample(server, "slipstream_requests_running") == 4, PATIENCE)
        load = await client.load()
        assert load.running_requests == 4 == load.live_requests
        assert {pool.name: pool.capacity for pool in load.pools}["req"] == 2 * 64
        each = [sample(server, "slipstream_replica_running_requests", replica=name) for name in "01"]
        assert each == [2, 2]
        pages = [sample(server, "slipstream_replica_kv_used_pages", replica=name) for name in "01"]
        assert sum(pages) > 0 < min(pages)
        assert sample(server, "slipstream_pool_capacity", pool="kv_page") == sum(
            sample(server, "slipstream_replica_kv_pages", replica=name) for name in "01"
        )
        for place, (call, _) in enumerate(streams):
            call.cancel()
            await client.abort(f"s{place}")
        await until(lambda: sample(server, "slipstream_requests_finished_total", reason="cancelled") == 4, PATIENCE)


async def test_a_server_is_ready_while_one_engine_is() -> None:
    async with serving() as (server, rig, client), asyncio.timeout(2 * PATIENCE):
        health = health_pb2_grpc.HealthStub(client.channel)

        async def ready() -> bool:
            answer = await health.Check(health_pb2.HealthCheckRequest(service=READINESS))
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

        rig.refuse.add(0)
        rig.lose(0)
        await until(lambda: sample(server, "slipstream_replica_ready", replica="0") == 0.0, PATIENCE)
        assert await ready() and sample(server, "slipstream_ready") == 1.0
        assert (await uninterrupted(client, [5, 6], max_tokens=3, **GREEDY)).ids
        rig.refuse.clear()
        await until(lambda: sample(server, "slipstream_replica_ready", replica="0") == 1.0, PATIENCE)
        rig.refuse.update((0, 1))
        rig.lose(0)
        rig.lose(1)
        await asyncio.wait_for(server.engine.wait_dead(), PATIENCE)
        assert not await ready() and sample(server, "slipstream_ready") == 0.0
