"""The client: retries only what is safe, tells errors apart, and leaves nothing running behind it."""

from __future__ import annotations

import asyncio
import json

import grpc
import pytest

from core.errors import Draining, Overloaded
from core.types.io import GenerateRequest
from service.client import CallFailed, Chunk, SlipstreamClient
from service.pb.slipstream.v1 import inference_pb2 as pb
from service.pb.slipstream.v1 import inference_pb2_grpc
from tests.fakes.fake_engine import FakeEngine, FakeStream, held
from tests.fakes.within import within
from tests.service.conftest import PATIENCE, Serve


class Flaky(FakeEngine):
    """Refuses the first `failures` requests with `error`."""

    def __init__(self, error: Exception, failures: int) -> None:
        super().__init__()
        self.error = error
        self.left = failures
        self.asked = 0

    async def generate(self, request: GenerateRequest) -> FakeStream:
        self.asked += 1
        if self.left:
            self.left -= 1
            raise self.error
        return await super().generate(request)


async def test_unavailable_before_the_first_message_is_retried(serve: Serve) -> None:
    engine = Flaky(Draining("going"), failures=2)
    async with serve(engine) as serving:
        assert len((await serving.client.complete("hi"))[0].token_ids) == 8
    assert engine.asked == 3


async def test_retries_end_and_the_error_is_told(serve: Serve) -> None:
    engine = Flaky(Draining("going"), failures=9)
    async with serve(engine) as serving:
        with pytest.raises(CallFailed) as failed:
            await serving.client.complete("hi")
    assert (engine.asked, failed.value.reason) == (3, "DRAINING")


async def test_overload_is_not_retried(serve: Serve) -> None:
    engine = Flaky(Overloaded("full", reason="QUEUE_FULL", retry_after=0.0), failures=1)
    async with serve(engine) as serving:
        with pytest.raises(CallFailed) as failed:
            await serving.client.complete("hi")
    assert (engine.asked, failed.value.reason, failed.value.retry_after) == (1, "QUEUE_FULL", 0.0)


async def test_a_client_that_does_retry_overload_is_not_left_waiting(serve: Serve) -> None:
    """By a policy of its own. A rate of thousands per second rounds the time to come back after to nothing."""
    policy = {"maxAttempts": 2, "initialBackoff": "1s", "maxBackoff": "1s", "backoffMultiplier": 1}
    method = {"name": [{}], "retryPolicy": policy | {"retryableStatusCodes": ["RESOURCE_EXHAUSTED"]}}
    config = json.dumps({"methodConfig": [method]})
    engine = Flaky(Overloaded("full", reason="RATE_LIMIT", retry_after=0.0001), failures=1)
    async with serve(engine) as serving:
        async with grpc.aio.insecure_channel(serving.target, options=(("grpc.service_config", config),)) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            async with within(PATIENCE, "the call is made again"):
                responses = [each async for each in stub.Generate(pb.GenerateRequest(text="hi"))]
    assert (engine.asked, responses[-1].WhichOneof("event")) == (2, "finished")


async def test_a_stream_that_has_begun_is_not_repeated(serve: Serve) -> None:
    engine = FakeEngine(held(asyncio.Event(), after=2))
    async with serve(engine) as serving:
        events = serving.client.generate("hi")
        assert isinstance(await anext(events), Chunk)
        engine.streams[0].cut(Draining("going"))
        with pytest.raises(CallFailed) as failed:
            _ = [event async for event in events]
    assert (failed.value.code, failed.value.tokens_emitted) == (grpc.StatusCode.UNAVAILABLE, 2)
    assert len(engine.streams) == 1


async def test_no_server_at_all() -> None:
    async with SlipstreamClient("127.0.0.1:1") as client:
        with pytest.raises(CallFailed) as failed:
            await client.tokenize("x")
    assert (failed.value.code.name, failed.value.reason) == ("UNAVAILABLE", "")


async def test_reflection_is_off_unless_asked_for(serve: Serve) -> None:
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    async def services(client: SlipstreamClient) -> list[str]:
        stub = reflection_pb2_grpc.ServerReflectionStub(client.channel)

        async def ask():  # type: ignore[no-untyped-def]
            yield reflection_pb2.ServerReflectionRequest(list_services="")

        answers = [answer async for answer in stub.ServerReflectionInfo(ask())]
        return [each.name for each in answers[0].list_services_response.service]

    async with serve() as serving:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await services(serving.client)
        assert failed.value.code() is grpc.StatusCode.UNIMPLEMENTED
    async with serve(reflection=True) as serving:
        assert "slipstream.v1.InferenceService" in await services(serving.client)
