"""Processes that stop (SIGSTOP) without ending: health tells of it, calls are not left waiting, streams go on after."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from service.client import CallFailed, SlipstreamClient
from service.frontends.heartbeat import DEAD_SECONDS, STALE_SECONDS
from service.servicers.health import LIVENESS, READINESS
from tests.chaos.device import Faults
from tests.chaos.process import ServerProcess, settled
from tests.support.ports import free_port
from tests.system.test_frontends import FRONT_ENDS, PATIENCE, Places, begun, failure, front_ends

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SLACK = 10.0
"""What two loaded cores may add to a bound."""


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    port = free_port()
    started = ServerProcess(
        Faults(step_seconds=0.005),
        frontends=FRONT_ENDS,
        health_port=port,
        max_running_requests=64,
        max_total_tokens=64 * 1024,
        drain_grace=1,
    )
    started.health_target = f"127.0.0.1:{port}"  # type: ignore[attr-defined]
    try:
        yield started.wait_ready()
    finally:
        children = front_ends(started)
        started.send(signal.SIGCONT)
        started.close()
        _, left = psutil.wait_procs(children, timeout=PATIENCE)
        assert not left, "front ends outlived the engine's process"


def health_target(server: ServerProcess) -> str:
    return str(server.health_target)  # type: ignore[attr-defined]


@asynccontextmanager
async def stopped(pid: int) -> AsyncIterator[None]:
    """The process stands still meanwhile."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


async def asked(target: str, service: str) -> int:
    """One Check over a connection of its own."""
    async with grpc.aio.insecure_channel(target, (("grpc.use_local_subchannel_pool", 1),)) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=PATIENCE)
        return int(answer.status)


async def told(client: SlipstreamClient, words: list[int]) -> None:
    """Follow readiness over the client's connection."""
    watch = health_pb2_grpc.HealthStub(client.channel).Watch(health_pb2.HealthCheckRequest(service=READINESS))
    with contextlib.suppress(grpc.aio.AioRpcError):
        async for answer in watch:
            words.append(answer.status)


async def until_said(words: dict[int, list[int]], wanted: list[int], within: float) -> None:
    async with asyncio.timeout(within):
        while any(said != wanted for said in words.values()):
            await asyncio.sleep(0.05)


async def test_front_ends_of_a_stopped_engine_say_so_and_come_back_with_it(server: ServerProcess) -> None:
    async with Places(server) as clients:
        words: dict[int, list[int]] = {pid: [] for pid in clients}
        watches = [asyncio.create_task(told(client, words[pid])) for pid, client in clients.items()]
        streams = [(await begun(client, 600))[0] for client in clients.values()]
        await until_said(words, [SERVING], PATIENCE)
        async with stopped(server.pid):
            await until_said(words, [SERVING, NOT_SERVING], STALE_SECONDS + SLACK)
            for target in (server.target, health_target(server)):
                for _ in range(8):
                    assert await asked(target, READINESS) == NOT_SERVING
            for client in clients.values():
                for call in (client.complete([3], max_tokens=2), client.tokenize("a"), client.load()):
                    with pytest.raises(CallFailed) as refused:
                        await asyncio.wait_for(call, PATIENCE)
                    assert (refused.value.code.name, refused.value.reason) == ("UNAVAILABLE", "ENGINE_SILENT")
                    assert refused.value.retry_after
            async with asyncio.timeout(DEAD_SECONDS + SLACK):
                while await asked(server.target, LIVENESS) != NOT_SERVING:
                    await asyncio.sleep(0.1)
        await until_said(words, [SERVING, NOT_SERVING, SERVING], SLACK)
        for task in streams:
            chunks = await asyncio.wait_for(task, PATIENCE)
            places = [place for c in chunks for place in range(c.position, c.position + len(c.token_ids))]
            assert places == list(range(600)), "a stream goes on where it stood still"
        assert await asked(server.target, LIVENESS) == SERVING
        assert {child.pid for child in front_ends(server)} == set(clients), "silence of the engine's kills no front end"
        for task in watches:
            task.cancel()
        await asyncio.gather(*watches, return_exceptions=True)


async def test_a_stopped_front_end_is_replaced_and_its_connections_are_let_go(server: ServerProcess) -> None:
    """Until then the kernel gives it a share of the new connections, which it accepts and never answers."""
    async with Places(server) as clients:
        (frozen, lost_client), (_, kept_client) = clients.items()
        (lost, _), (kept, _) = await begun(lost_client), await begun(kept_client, 600)
        async with stopped(frozen):
            callers = [server.client() for _ in range(12)]
            calls = [asyncio.ensure_future(caller.complete([4], max_tokens=4)) for caller in callers]
            async with asyncio.timeout(DEAD_SECONDS + SLACK):
                outcomes = await asyncio.gather(*calls, return_exceptions=True)
            for caller in callers:
                await caller.close()
        assert (await failure(lost)).code.name == "UNAVAILABLE"
        assert sum(isinstance(each, list) for each in outcomes) == len(callers), "each call found a server in the end"
        chunks = await asyncio.wait_for(kept, PATIENCE)
        assert sum(len(chunk.token_ids) for chunk in chunks) == 600, "the other front end's stream is whole"
        await settled(server)
        async with asyncio.timeout(PATIENCE):
            while len(front_ends(server)) < FRONT_ENDS:
                await asyncio.sleep(0.05)
    assert frozen not in {child.pid for child in front_ends(server)}
    async with Places(server) as clients:
        assert len(clients) == FRONT_ENDS
