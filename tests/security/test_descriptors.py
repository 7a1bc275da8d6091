"""Clients that connect and say nothing: descriptors do not run out, and of all connections the right ones go."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from time import thread_time
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from service.server.connections import IDLE_SECONDS, Connection, Connections, _end, _is_open, victims
from tests.chaos.process import PATIENCE, ServerProcess
from tests.contract.api.raw_http2 import PREFACE, SETTINGS, frame
from tests.security.serve_few_files import FILES
from tests.support.kept_server import GREEDY
from tests.support.ports import free_port

IDLE = 200
MANY = 64


def some(address: str, silences: list[float]) -> list[Connection]:
    return [Connection(100 + at, address, 4000 + at, silent) for at, silent in enumerate(silences)]


def test_the_longest_silent_of_the_address_that_has_most_go_first() -> None:
    many, few = some("10.0.0.1", [9.0, 3.0, 7.0, 5.0]), some("10.0.0.2", [60.0, 50.0])
    assert victims([*few, *many], (), 6) == []
    assert [each.silent for each in victims([*few, *many], (), 4)] == [9.0, 7.0]
    assert [each.silent for each in victims([*few, *many], (), 3)] in ([9.0, 7.0, 5.0], [9.0, 7.0, 60.0])
    assert len(victims([*few, *many], (), 0)) == 6


def test_one_with_calls_or_just_heard_of_stays_unless_its_address_has_more_than_half() -> None:
    fresh, old = some("10.0.0.1", [0.0]) + some("10.0.0.4", [IDLE_SECONDS / 2]), some("10.0.0.2", [9.0, 8.0])
    busy = {("10.0.0.2", 4000)}
    assert [each.silent for each in victims([*fresh, *old], busy, 2)] == [8.0], "of the others none may go"
    flood = some("10.0.0.3", [5.0] * 8)
    calling = {(each.address, each.port) for each in flood} | busy
    gone = victims([*flood, *old], calling, 6)
    assert {each.address for each in gone[:-1]} <= {"10.0.0.2", "10.0.0.3"}
    assert sum(each.address == "10.0.0.3" for each in gone) == 3, "calls that are open do not keep all places"
    assert old[0] not in gone


@pytest.mark.alone
def test_choosing_among_all_that_there_can_be_takes_seconds_and_not_minutes() -> None:
    """It takes turns with the event loop: what is quadratic in 16,000 is minutes of both."""
    flood = some("10.0.0.1", [2.0 + at for at in range(8000)])
    others = [Connection(at, f"10.{at // 256}.{at % 256}.2", at, 100_000.0 + at) for at in range(8000)]
    began = thread_time()
    gone = victims([*flood, *others], (), 4000)
    assert thread_time() - began < 8.0
    assert gone[:7999] == flood[:0:-1], "the flood goes until no address has more, the longest silent first"
    assert len(gone) == 12_000 and len(set(gone)) == 12_000


def test_what_is_no_connection_takes_from_their_part_of_the_descriptors() -> None:
    """The other ends, which are of this process too, are files as any for its limit."""
    # More than what tests before this one have left open in their process.
    many = MANY + 2 * sum(map(_is_open, range(4096)))
    with ExitStack() as held:
        listening = held.enter_context(socket.create_server(("127.0.0.1", 0), backlog=many))
        port = listening.getsockname()[1]
        for _ in range(many):
            held.enter_context(socket.create_connection(("127.0.0.1", port), timeout=PATIENCE))
        accepted = [held.enter_context(listening.accept()[0]) for _ in range(many)]
        limit = max(each.fileno() for each in accepted) + 1
        others = sum(map(_is_open, range(limit))) - many
        most = limit * 2 // 3 - others
        assert 0 < most < many, (limit, others)
        Connections(lambda: [port]).make_room(limit)
        assert sum(map(_is_up, accepted)) == most


def _is_up(accepted: socket.socket) -> bool:
    try:
        return bool(accepted.recv(1, socket.MSG_DONTWAIT))
    except BlockingIOError:
        return True


@pytest.mark.parametrize(
    ("peer", "end"),
    [
        ("ipv4:127.0.0.1:4711", ("127.0.0.1", 4711)),
        ("ipv6:%5B::1%5D:4711", ("::1", 4711)),
        ("ipv6:%5B::ffff:10.1.2.3%5D:9", ("10.1.2.3", 9)),
        ("unix:", ("unix:", 0)),
    ],
)
def test_ends_are_named_as_the_system_names_them(peer: str, end: tuple[str, int]) -> None:
    assert _end(peer) == end


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    process = ServerProcess(program="tests.security.serve_few_files", health_port=free_port())
    try:
        yield process.wait_ready()
    finally:
        process.close()


async def _health(target: str) -> str:
    """What it answers, or how the call fails."""
    options = (("grpc.use_local_subchannel_pool", 1),)
    async with grpc.aio.insecure_channel(target, options) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE)
        except grpc.aio.AioRpcError as error:
            return error.code().name
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


async def test_probes_and_metrics_answer_beside_idle_connections(server: ServerProcess) -> None:
    """200 connections that speak HTTP/2 and never call, where 128 descriptors are all. A stream that runs goes on.

    They come from another address: they may all be there within a second, before one of them counts as idle.
    """
    held = []
    async with server.client() as client:
        running = client.generate([3], max_tokens=1500, **GREEDY)
        await anext(running)
        try:
            for _ in range(IDLE):
                idle: Any = socket.create_connection(("127.0.0.1", server.port), PATIENCE, ("127.0.0.2", 0))
                idle.sendall(PREFACE + frame(SETTINGS, 0, 0, b""))
                held.append(idle)
            async with asyncio.timeout(PATIENCE):
                for _ in range(3):
                    assert await _health(server.target) == "SERVING"
                    metrics = await server.metrics()
                    assert metrics["slipstream_process_max_fds"] == FILES
            assert sum([1 async for _ in running]) > 1, "the connection with a call stays"
        finally:
            for idle in held:
                idle.close()
