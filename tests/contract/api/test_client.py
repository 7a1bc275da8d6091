"""The client: retries only what is safe, tells errors apart, and leaves nothing running behind it."""

from __future__ import annotations

import asyncio
import json

import grpc
import pytest

from core.errors import Draining, Overloaded, QueueTimeout, SlowConsumer
from core.types.io import GenerateRequest
from service.client import CallFailed, Chunk, SlipstreamClient
from service.pb.slipstream.v1 import inference_pb2 as pb
from service.pb.slipstream.v1 import inference_pb2_grpc
from tests.support.fakes.fake_engine import FakeEngine, FakeStream, held
from tests.support.fakes.granted import granted
from tests.support.servers import Serve
from tests.support.until import PATIENCE
from tests.support.within import within


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
    engine = Flaky(Draining("going"), failures=1)
    async with serve(engine) as serving:
        assert len((await serving.client.complete("hi"))[0].token_ids) == 8
    assert engine.asked == 2


async def test_retries_end_and_the_error_is_told(serve: Serve) -> None:
    engine = Flaky(Draining("going"), failures=9)
    async with serve(engine) as serving:
        with pytest.raises(CallFailed) as failed:
            await serving.client.complete("hi")
    assert (engine.asked, failed.value.reason) == (2, "DRAINING")


async def test_overload_is_retried_when_the_server_says_when(serve: Serve) -> None:
    engine = Flaky(Overloaded("full", reason="QUEUE_FULL", retry_after=0.01), failures=1)
    async with serve(engine) as serving:
        with granted("the second attempt finds room"):
            assert len((await serving.client.complete("hi"))[0].token_ids) == 8
    assert engine.asked == 2


async def test_the_server_decides_when_a_call_is_made_again(serve: Serve) -> None:
    """Not the policy, whose first backoff is a tenth of a second: the hint is five seconds, the deadline one."""
    engine = Flaky(Overloaded("full", reason="QUEUE_FULL", retry_after=5.0), failures=1)
    async with serve(engine) as serving:
        with pytest.raises(CallFailed):
            await serving.client.complete("hi", timeout=1.0)
    assert engine.asked == 1


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (QueueTimeout("waited"), "QUEUE_TIMEOUT"),
        (SlowConsumer("slow"), "SLOW_CONSUMER"),
        (Overloaded("come back in half a minute", reason="RESUME_BYTES", retry_after=30.0), "RESUME_BYTES"),
    ],
    ids=["queue timeout", "slow consumer", "too long to wait without a word"],
)
async def test_what_the_server_says_not_to_retry_is_not(serve: Serve, error: Exception, reason: str) -> None:
    engine = Flaky(error, failures=1)
    async with serve(engine) as serving:
        with pytest.raises(CallFailed) as failed:
            await serving.client.complete("hi")
    assert (engine.asked, failed.value.code.name, failed.value.reason) == (1, "RESOURCE_EXHAUSTED", reason)


async def test_a_message_that_is_too_large_is_sent_once(serve: Serve) -> None:
    """gRPC itself refuses it, with the code of an overload and without a hint."""
    async with serve() as serving:
        with pytest.raises(CallFailed) as failed:
            await serving.client.tokenize("x" * (4 * 1024 * 1024 + 1))
        assert failed.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (
            await serving.metric('slipstream_rpc_started_total{method="slipstream.v1.InferenceService/Tokenize"}') == 1
        )


async def test_a_client_with_a_policy_of_its_own_is_not_left_waiting(serve: Serve) -> None:
    """A rate of thousands per second rounds the time to come back after to nothing."""
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
        got = 0
        while got < 2:
            chunk = await anext(events)
            assert isinstance(chunk, Chunk)
            got += len(chunk.token_ids)
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

    asked = reflection_pb2.ServerReflectionRequest(list_services="")

    async def services(client: SlipstreamClient) -> list[str]:
        async def ask():  # type: ignore[no-untyped-def]
            yield asked

        stub = reflection_pb2_grpc.ServerReflectionStub(client.channel)
        answers = [answer async for answer in stub.ServerReflectionInfo(ask())]
        return [each.name for each in answers[0].list_services_response.service]

    async with serve() as serving:
        # The same bytes as a unary call: over the refusal of a stream of requests, `grpc.aio`'s client may put an
        # INTERNAL of its own while it still writes.
        ask = serving.client.channel.unary_unary("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await ask(asked.SerializeToString())
        assert failed.value.code() is grpc.StatusCode.UNIMPLEMENTED
    async with serve(reflection=True) as serving:
        assert "slipstream.v1.InferenceService" in await services(serving.client)
