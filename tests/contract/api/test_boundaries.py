"""Every numeric field at its edges, and frozen clients: only documented codes, and the server stays well."""

from __future__ import annotations

import asyncio
import math
import signal
import sys
from typing import Any

import grpc
import grpc.aio
import pytest

from service.client import CallFailed
from service.pb.slipstream.v1 import inference_pb2 as pb
from tests.contract.api.test_cancellation import closed
from tests.support.fakes.fake_engine import FakeEngine, held
from tests.support.repository import ROOT
from tests.support.servers import Serve

INTS = (-(2**31), -1, 0, 1, 2, 64, 65, 2**31 - 1)
LONGS = (-(2**63), -1, 0, 1, 2**63 - 1)
DOUBLES = (math.nan, math.inf, -math.inf, -1.0, -0.0, 0.0, 1e-308, 1.0, 1.0000001, 2.0, 10.0, 100.0, 1e308)

EDGES: dict[int, tuple[Any, ...]] = {
    pb.SamplingParams.DESCRIPTOR.fields_by_name["top_k"].cpp_type: INTS,
    pb.SamplingParams.DESCRIPTOR.fields_by_name["seed"].cpp_type: LONGS,
    pb.SamplingParams.DESCRIPTOR.fields_by_name["top_p"].cpp_type: DOUBLES,
}

SCALARS = [field for field in pb.SamplingParams.DESCRIPTOR.fields if field.has_presence and field.cpp_type in EDGES]
CASES = [(field.name, value) for field in SCALARS for value in EDGES[field.cpp_type]]


async def outcome(serving: Any, request: pb.GenerateRequest) -> CallFailed | None:
    """The failure of a request; None if it succeeded or was still running well after its first tokens."""
    call = serving.stub.Generate(request)
    try:
        for _ in range(5):
            if await call.read() is grpc.aio.EOF:
                break
    except grpc.aio.AioRpcError as error:
        return CallFailed(error)
    finally:
        call.cancel()
    return None


async def test_every_scalar_at_its_edges_is_served_or_refused_by_name(serve: Serve) -> None:
    async with serve() as serving:
        for name, value in CASES:
            request = pb.GenerateRequest(text="hi", sampling_params=pb.SamplingParams(**{name: value}))
            failed = await outcome(serving, request)
            if failed is not None:
                assert failed.code is grpc.StatusCode.INVALID_ARGUMENT, (name, value, failed)
                assert all(field.startswith("sampling_params.") for field in failed.fields), (name, value)
                assert failed.fields, (name, value)
        bad = [value for name, value in CASES if name == "temperature" and not 0 <= value <= 100]
        for value in bad:
            request = pb.GenerateRequest(text="hi", sampling_params=pb.SamplingParams(temperature=value))
            assert await outcome(serving, request) is not None, value


@pytest.mark.parametrize("key", [-1, 0, 999, 1000, 2**31 - 1])
@pytest.mark.parametrize("bias", [math.nan, math.inf, -100.0, 100.0, 100.1])
async def test_logit_bias_at_its_edges(serve: Serve, key: int, bias: float) -> None:
    async with serve() as serving:
        request = pb.GenerateRequest(text="hi", sampling_params=pb.SamplingParams(logit_bias={key: bias}))
        failed = await outcome(serving, request)
    fine = 0 <= key < 1000 and -100 <= bias <= 100
    assert (failed is None) == fine
    if failed is not None:
        assert list(failed.fields) == [f"sampling_params.logit_bias[{key}]"]


FROZEN_CLIENT = """
import asyncio, sys
from service.client import SlipstreamClient

async def main():
    async with SlipstreamClient(sys.argv[1]) as client:
        async for _ in client.generate("hi"):
            print("streaming", flush=True)

asyncio.run(main())
"""


async def test_a_frozen_client_is_noticed_by_the_ping_timeout(serve: Serve) -> None:
    """SIGSTOP: its kernel still takes bytes, so only an unanswered ping can tell."""
    engine = FakeEngine(held(asyncio.Event(), after=1))
    async with serve(engine, keepalive_time=0.3, keepalive_timeout=0.3) as serving:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", FROZEN_CLIENT, serving.target),
            cwd=ROOT,
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        try:
            assert await process.stdout.readline() == b"streaming\n"
            process.send_signal(signal.SIGSTOP)
            await closed(engine)
        finally:
            process.kill()
            await process.communicate()
