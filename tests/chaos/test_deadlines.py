"""Deadlines that had passed before the call arrived: refused by whoever sees it first, and never computed for."""

from __future__ import annotations

import asyncio

import pytest

from service.pb.slipstream.v1 import inference_pb2 as pb
from tests.chaos.process import ServerProcess, settled
from tests.chaos.test_slow_readers import GENERATE
from tests.contract.api.raw_http2 import DeafClient
from tests.support.scorecard import Scorecard

pytestmark = pytest.mark.alone

CALLS = 50


async def test_the_dead_on_arrival_never_cost_a_forward_row(shared: ServerProcess, scorecard: Scorecard) -> None:
    """A client library would not send such a call, so it is sent by hand: one nanosecond of time."""
    before, tokens = await settled(shared), await shared.metrics()
    message = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2, 3])).SerializeToString()
    late = await DeafClient.connect(shared.port, 65_535)
    for _ in range(CALLS):
        await late.call(GENERATE, message, [("grpc-timeout", "1n")])
    async with shared.client() as client:
        await asyncio.gather(*(client.complete([1, 2], max_tokens=3, ignore_eos=True) for _ in range(4)))
    after, now = await settled(shared), await shared.metrics()
    await late.close()
    wasted = now["slipstream_prompt_tokens_total"] - tokens["slipstream_prompt_tokens_total"] - 4 * 2
    scorecard(16, f"forward rows spent on {CALLS} calls that arrived late", int(wasted), equals=0)
    assert after[0].step - before[0].step <= 4 * 4 + 4
