"""Clients that do not read: evicted by status within the write timeout, their stream closed, others untouched."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import grpc
import grpc.aio
import pytest

from core.types.io import Delta, GenerateRequest
from service.client import CallFailed
from service.pb.slipstream.v1 import inference_pb2 as pb
from tests.contract.api.raw_http2 import DeafClient
from tests.contract.api.test_cancellation import closed
from tests.support.fakes.fake_engine import FakeEngine, Step, count_up
from tests.support.servers import Serve
from tests.support.until import PATIENCE, until

CHUNK = 256 * 1024
ENDLESS = "endless"


def script(request: GenerateRequest) -> Iterator[Step]:
    """Without end and in large pieces for the request that asks for it; the usual for others."""
    if request.text != ENDLESS:
        yield from count_up(request)
        return
    position = 0
    while True:
        yield Delta(0, position, (position,), "x" * CHUNK)
        position += 1


async def test_a_client_that_stops_reading_is_evicted_and_sees_why(serve: Serve) -> None:
    async with serve(FakeEngine(script), write_timeout=0.3) as serving:
        call = serving.stub.Generate(pb.GenerateRequest(text=ENDLESS))
        assert (await call.read()).HasField("started")
        await closed(serving.engine)
        assert serving.engine.live_requests == 0
        # What was buffered arrives first, then the status: positions without a gap and no token twice.
        positions: list[int] = []
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            while (response := await call.read()) is not grpc.aio.EOF:
                positions.append(response.delta.position)
            raise AssertionError("the call ended without an error")
        evictions = await serving.metric("slipstream_slow_consumer_evictions_total")
    error = CallFailed(failed.value)
    assert (error.code.name, error.reason) == ("RESOURCE_EXHAUSTED", "SLOW_CONSUMER")
    assert positions == list(range(len(positions)))
    assert error.tokens_emitted >= len(positions)
    assert evictions == 1


async def test_clients_with_a_zero_window_hold_nothing_after_the_write_timeout(serve: Serve) -> None:
    count = 30
    async with serve(FakeEngine(script), write_timeout=0.3) as serving:
        deaf = await DeafClient.connect(serving.server.port)
        message = pb.GenerateRequest(text=ENDLESS).SerializeToString()
        for _ in range(count):
            await deaf.call("/slipstream.v1.InferenceService/Generate", message)
        good = await serving.client.complete("hi", max_tokens=20)
        assert len(good[0].token_ids) == 20, "others are not slowed down"
        for number in range(1, count + 2):
            await closed(serving.engine, number)
        assert serving.engine.live_requests == 0
        await deaf.close()


async def test_a_deaf_health_watcher_does_not_hold_up_a_change_of_state(serve: Serve) -> None:
    async with serve(write_timeout=0.3) as serving:
        deaf = await DeafClient.connect(serving.server.port)
        await deaf.call("/grpc.health.v1.Health/Watch", b"")
        await until(lambda: len(serving.server.tracker) == 1)
        async with asyncio.timeout(PATIENCE):
            assert await serving.server.drain(0.0, 1.0) == 0
        await deaf.close()
