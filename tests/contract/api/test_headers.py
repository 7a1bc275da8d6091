"""When a call's headers go out: gRPC does not retry it elsewhere from then on, and the first token waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from core.errors import Draining
from core.types.io import GenerateRequest, Started
from service.client import CallFailed
from service.pb.slipstream.v1 import inference_pb2 as pb
from tests.support.fakes.fake_engine import FakeEngine, Script, Step, count_up
from tests.support.servers import Serve


def gated(queued: asyncio.Event, computed: asyncio.Event) -> Script:
    """In the queue until `queued`; the first token is there from `computed` on."""

    def script(request: GenerateRequest) -> Iterator[Step]:
        yield queued
        yield Started(request.request_id, 3)
        yield computed
        yield from count_up(request)

    return script


async def test_headers_go_out_while_the_first_token_is_computed(serve: Serve) -> None:
    queued, computed = asyncio.Event(), asyncio.Event()
    async with serve(FakeEngine(gated(queued, computed))) as serving:
        call = serving.stub.Generate(pb.GenerateRequest(request_id="r-1", text="hi"))
        await serving.engine.stream_number(1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(call.initial_metadata()), 0.1)
        queued.set()
        responses = aiter(call)
        async with asyncio.timeout(10):
            assert dict(await call.initial_metadata()).get("slipstream-request-id") == "r-1"
            assert (await anext(responses)).started.prompt_tokens == 3
        computed.set()
        kinds = [response.WhichOneof("event") async for response in responses]
    assert kinds == ["delta"] * 8 + ["finished"], "started once"


async def test_a_failure_while_the_first_token_is_computed_is_not_retried(serve: Serve) -> None:
    """The process may have died of it; from the queue it would be sent once more."""

    def script(request: GenerateRequest) -> list[Step]:
        return [Started(request.request_id, 3), Draining("going")]

    async with serve(FakeEngine(script)) as serving:
        with pytest.raises(CallFailed) as failed:
            await serving.client.complete("hi")
        assert len(serving.engine.streams) == 1
    assert (failed.value.reason, failed.value.tokens_emitted) == ("DRAINING", 0)
