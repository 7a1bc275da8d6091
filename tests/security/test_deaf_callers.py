"""Answers of one message that are never read: the calls end within the time of a write, and are counted as slow."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest

from service.limits.unread_answers import MOST_BYTES, REASON
from service.pb.slipstream.v1 import inference_pb2 as pb
from tests.chaos.process import PATIENCE, ServerProcess
from tests.contract.api.raw_http2 import DeafClient

pytestmark = pytest.mark.alone

SERVICE = "slipstream.v1.InferenceService"
CALLS = 20
UNREAD = 60
LONGEST = 656
"""The token of the bundled model with the longest text, of ten characters."""


async def test_answers_without_a_reader_are_let_go() -> None:
    process = ServerProcess(write_timeout=0.5)
    try:
        process.wait_ready()
        deaf = await DeafClient.connect(process.port, answers_pings=True)
        message = pb.TokenizeRequest(text="27+45=" * 2_500).SerializeToString()
        for _ in range(CALLS):
            await deaf.call(f"/{SERVICE}/Tokenize", message)
        name = f'slipstream_rpc_handled_total{{code="RESOURCE_EXHAUSTED",method="{SERVICE}/Tokenize"}}'
        async with asyncio.timeout(PATIENCE):
            while (await process.metrics()).get(name, 0) < CALLS:
                await asyncio.sleep(0.05)
        async with process.client() as client:
            assert await client.tokenize("27+45="), "and others are answered"
        await deaf.close()
    finally:
        process.close()


async def test_unread_answers_of_a_caller_are_bounded_in_bytes() -> None:
    """60 answers of 640 KiB at once to a client that takes 16 KiB of each: those beyond 16 MiB are refused."""
    process = ServerProcess(write_timeout=60)
    try:
        process.wait_ready()
        message = pb.DetokenizeRequest(token_ids=[LONGEST] * 65_536).SerializeToString()
        async with process.client(**{"http2.bdp_probe": 0, "http2.lookahead_bytes": 16_384}) as client:
            method = client.channel.unary_stream(f"/{SERVICE}/Detokenize")
            calls: list[Any] = [method(message) for _ in range(UNREAD)]
            ends = [asyncio.ensure_future(call.code()) for call in calls]
            fit = MOST_BYTES // (65_536 * 10)
            async with asyncio.timeout(PATIENCE):
                while sum(end.done() for end in ends) < UNREAD - fit:
                    await asyncio.wait([end for end in ends if not end.done()], return_when=asyncio.FIRST_COMPLETED)
            refused = [call for call, end in zip(calls, ends, strict=True) if end.done()]
            assert len(refused) == UNREAD - fit, "and no more"
            for call in refused:
                assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                trailers = dict(await call.trailing_metadata())
                assert REASON.encode() in trailers["grpc-status-details-bin"] and "grpc-retry-pushback-ms" in trailers
            for call in calls:
                call.cancel()
            assert await client.tokenize("27+45="), "room comes back with the calls"
    finally:
        process.close()
