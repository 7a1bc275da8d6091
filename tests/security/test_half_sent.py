"""Messages that never end: what the server holds of them is bounded, they are ended in time, and others are served."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from service.limits.request_reads import AT_ONCE
from tests.chaos.process import PATIENCE, ServerProcess
from tests.security.half_sender import HalfSender
from tests.support.scorecard import Scorecard

pytestmark = pytest.mark.alone

CHECK = "/grpc.health.v1.Health/Check"
LARGEST = 4 * 1024 * 1024
CALLS = 48
"""On each of two connections."""


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    process = ServerProcess(program="tests.security.serve_impatient")
    try:
        yield process.wait_ready()
    finally:
        process.close()


async def test_half_sent_messages_hold_little_and_end(server: ServerProcess, scorecard: Scorecard) -> None:
    """Of a method that needs no token, half of them; of another the rest."""
    before = (await server.probe()).rss
    senders = [await HalfSender.connect(server.port, "127.0.0.9") for _ in range(2)]
    most = 0
    try:
        for sender, path in zip(senders, (CHECK, "/slipstream.v1.InferenceService/Tokenize"), strict=True):
            for _ in range(CALLS):
                sender.begin(path, LARGEST)
        done = asyncio.gather(*(sender.until_ended(CALLS) for sender in senders))
        async with asyncio.timeout(4 * PATIENCE):
            while not done.done():
                most = max(most, (await server.probe()).rss)
                await asyncio.wait((done,), timeout=0.2)
        assert sum(sender.sent for sender in senders) > 2 * CALLS * 10_000, "they were sent as far as they could be"
        # Messages of 4 MiB that are being read, half as much again of those that ended just before, and windows of
        # 16 KiB for the others.
        scorecard(35, "half-sent messages: RSS, MB", round((most - before) / 1e6), at_most=1.5 * AT_ONCE * 4.2 + 40)
    finally:
        for sender in senders:
            await sender.close()


async def test_another_address_is_answered_at_once(server: ServerProcess) -> None:
    sender = await HalfSender.connect(server.port, "127.0.0.9")
    try:
        for _ in range(200):
            sender.begin(CHECK, LARGEST)
        async with server.client() as client, asyncio.timeout(PATIENCE):
            stub = health_pb2_grpc.HealthStub(client.channel)
            for _ in range(50):
                answer = await stub.Check(health_pb2.HealthCheckRequest())
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
            assert await client.tokenize("27+45=")
            assert len(await client.tokenize("27+45=" * 80_000)) > 80_000, "of thirty windows"
        assert len(sender.ended) < 200, "meanwhile"
    finally:
        await sender.close()


async def test_a_call_without_a_message_is_told(server: ServerProcess) -> None:
    async with server.client() as client:
        call: Any = client.channel.stream_unary(CHECK)(iter(()))
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await asyncio.wait_for(call, PATIENCE)
        assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT and "request" in str(failed.value.details())
