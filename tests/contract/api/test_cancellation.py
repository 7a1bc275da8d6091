"""Clients that go away: cancel, deadline, disconnect. The engine's stream must be closed each time, and only once."""

from __future__ import annotations

import asyncio
import time

import grpc
import grpc.aio
import pytest

from service.client import CallFailed, Chunk, SlipstreamClient
from service.pb.slipstream.v1 import inference_pb2 as pb
from tests.support.fakes.fake_engine import FakeEngine, held
from tests.support.servers import Serve
from tests.support.until import PATIENCE
from tests.support.within import within


async def closed(engine: FakeEngine, count: int = 1) -> None:
    """Wait until the `count`-th stream was closed."""
    async with within(PATIENCE, f"stream {count} is closed"):
        stream = await engine.stream_number(count)
        await stream.closed.wait()


@pytest.mark.parametrize("tokens_first", [0, 3])
async def test_cancel_closes_the_stream(serve: Serve, tokens_first: int) -> None:
    async with serve(FakeEngine(held(asyncio.Event(), after=tokens_first))) as serving:
        call = serving.stub.Generate(pb.GenerateRequest(text="hi"))
        await serving.engine.stream_number(1)
        # Nothing is told of a request before it has a token.
        for _ in range(1 + tokens_first if tokens_first else 0):
            await call.read()
        call.cancel()
        await closed(serving.engine)
        assert serving.engine.live_requests == 0
        assert await serving.server.tracker.wait_idle(PATIENCE)
        cancelled = 'slipstream_rpc_handled_total{code="CANCELLED",method="slipstream.v1.InferenceService/Generate"}'
        assert await serving.metric(cancelled) == 1


async def test_leaving_the_loop_of_the_client_cancels(serve: Serve) -> None:
    async with serve(FakeEngine(held(asyncio.Event(), after=1))) as serving:
        events = serving.client.generate("hi")
        assert isinstance(await anext(events), Chunk)
        await events.aclose()
        await closed(serving.engine)


async def test_a_lost_connection_closes_the_stream(serve: Serve) -> None:
    async with serve(FakeEngine(held(asyncio.Event(), after=1))) as serving:
        other = SlipstreamClient(serving.target)
        call = other.stub.Generate(pb.GenerateRequest(text="hi"))
        await call.read()
        await other.close()
        await closed(serving.engine)


@pytest.mark.alone
async def test_the_clients_deadline_reaches_the_engine_and_ends_the_call(serve: Serve) -> None:
    async with serve(FakeEngine(held(asyncio.Event()))) as serving:
        before = time.monotonic()
        with pytest.raises(CallFailed) as failed:
            await serving.client.complete("hi", timeout=0.2)
        assert failed.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
        await closed(serving.engine)
        deadline = serving.engine.streams[0].request.deadline
    assert deadline is not None and before < deadline < before + 0.3


@pytest.mark.alone
async def test_the_servers_own_limit_ends_the_call_with_a_reason(serve: Serve) -> None:
    async with serve(FakeEngine(held(asyncio.Event(), after=2)), max_request_seconds=0.1) as serving:
        with pytest.raises(CallFailed) as failed:
            await serving.client.complete("hi", timeout=60)
    assert (failed.value.code.name, failed.value.reason) == ("DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED")
    assert failed.value.tokens_emitted == 2


async def test_without_deadline_or_limit_there_is_none(serve: Serve) -> None:
    async with serve() as serving:
        await serving.client.complete("hi")
        assert serving.engine.streams[0].request.deadline is None


async def test_a_duplicate_of_a_live_id_is_refused_and_the_first_goes_on(serve: Serve) -> None:
    gate = asyncio.Event()
    async with serve(FakeEngine(held(gate))) as serving:
        first = asyncio.create_task(serving.client.complete("hi", request_id="same"))
        await serving.engine.stream_number(1)
        with pytest.raises(CallFailed) as failed:
            await serving.client.complete("hi", request_id="same")
        assert failed.value.code is grpc.StatusCode.ALREADY_EXISTS
        gate.set()
        assert len((await first)[0].token_ids) == 8
        assert len((await serving.client.complete("hi", request_id="same"))[0].token_ids) == 8, "free again"


async def test_cancelling_many_at_random_moments_leaves_nothing_behind(serve: Serve) -> None:
    async with serve() as serving:

        async def one(number: int) -> None:
            call = serving.stub.Generate(
                pb.GenerateRequest(text="hi", sampling_params=pb.SamplingParams(max_tokens=50))
            )
            for _ in range(number % 13):
                await call.read()
            call.cancel()

        await asyncio.gather(*(one(number) for number in range(100)))
        assert await serving.server.tracker.wait_idle(PATIENCE)
        assert serving.engine.live_requests == 0
        assert all(stream.closed.is_set() for stream in serving.engine.streams)
        assert (await serving.client.complete("hi"))[0].end.reason == "length"
