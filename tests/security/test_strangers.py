"""A server without names for its callers: nobody follows, flushes or administers it, and a newcomer still streams."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from service.client import CallFailed
from service.client.adapters import AdapterClient
from tests.support.fakes.granted import granted
from tests.support.log_lines import LogLines
from tests.support.servers import Serve, serve_checkpoint

pb: Any = pytest.importorskip("smg_grpc_proto.generated.common_pb2", reason="pip install 'slipstream[gateway]'")

DIALECTS = ("sglang.grpc.scheduler.SglangScheduler", "vllm.grpc.engine.VllmEngine")
SECRET = "the launch code is seven"


def subscribe(channel: grpc.aio.Channel, dialect: str, **options: Any) -> Any:
    """An open SubscribeKvEvents call."""
    method = channel.unary_stream(
        f"/{dialect}/SubscribeKvEvents",
        request_serializer=pb.SubscribeKvEventsRequest.SerializeToString,
        response_deserializer=pb.KvEventBatch.FromString,
    )
    return method(pb.SubscribeKvEventsRequest(), timeout=10, **options)


async def flush(channel: grpc.aio.Channel, dialect: str, **options: Any) -> Any:
    """The answer of FlushCache."""
    method = channel.unary_unary(
        f"/{dialect}/FlushCache",
        request_serializer=pb.FlushCacheRequest.SerializeToString,
        response_deserializer=pb.FlushCacheResponse.FromString,
    )
    return await method(pb.FlushCacheRequest(), timeout=10, **options)


async def code_of(call: Any) -> grpc.StatusCode:
    """OK, or the code of the failure."""
    try:
        await call
    except (CallFailed, grpc.aio.AioRpcError) as error:
        code = error.code if isinstance(error, CallFailed) else error.code()
        assert isinstance(code, grpc.StatusCode)
        return code
    return grpc.StatusCode.OK


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_no_stranger_reads_what_others_asked(tiny: Path, dialect: str) -> None:
    """What the attack did: follow the cache, and turn the ids of its pages into text."""
    async with serve_checkpoint(tiny, page_size=8) as (_, client):
        with granted("a stream for a newcomer"):
            await client.complete(SECRET, max_tokens=8, temperature=0.0, ignore_eos=True)
        told = ""
        call = subscribe(client.channel, dialect)
        try:
            batch = await call.read()
            ids = [i for e in batch.events for block in e.stored.blocks for i in block.token_ids]
            told = await client.detokenize(ids)
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.PERMISSION_DENIED
    assert SECRET[:8] not in told, "anybody reads everybody"


async def test_what_strangers_may_do_is_said_by_one_flag(serve: Serve) -> None:
    opened: dict[str, list[str]] = {}
    for may in ("generate", "watch", "all"):
        async with serve(unnamed_callers=may) as serving:
            channel, adapters = serving.client.channel, AdapterClient(serving.client)
            with granted("a stream for a newcomer"):
                await serving.client.complete("hi")
            calls = {
                "events": subscribe(channel, DIALECTS[0]).read(),
                "flush": flush(channel, DIALECTS[0]),
                "load": adapters.load("x"),
                "unload": adapters.unload("x"),
            }
            codes = {name: await code_of(call) for name, call in calls.items()}
            opened[may] = [name for name, code in codes.items() if code is grpc.StatusCode.OK]
            refused = {code for code in codes.values() if code is not grpc.StatusCode.OK}
            assert refused <= {grpc.StatusCode.PERMISSION_DENIED}
    assert opened == {
        "generate": [],
        "watch": ["events", "flush"],
        "all": ["events", "flush", "load", "unload"],
    }


async def test_a_refusal_says_which_flag_it_is(serve: Serve, logged: LogLines) -> None:
    async with serve() as serving:
        with pytest.raises(CallFailed) as failed:
            await AdapterClient(serving.client).load("x")
    assert (failed.value.code.name, failed.value.reason) == ("PERMISSION_DENIED", "NOT_PERMITTED")
    assert "--unnamed-callers" in failed.value.message
    assert "Traceback" not in logged.text
