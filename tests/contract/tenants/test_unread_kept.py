"""What nobody reads of kept streams counts with their history: 16 streams of 16 outputs held ten times their bound."""

from __future__ import annotations

import asyncio

from core.engine.streams.unread import FREE_TOKENS
from service.pb.slipstream.v1 import inference_pb2 as pb
from service.resume.retention import STREAM_BYTES, _empty_bytes
from tests.support.kept_server import KeptServer, Seen, kept_server
from tests.system.test_attach import begun, refusal, rest

STREAMS, OUTPUTS, TOKENS = 4, 8, 150
BOUND = 4 * _empty_bytes(OUTPUTS) + 400_000


async def opened(server: KeptServer, name: str) -> None:
    """A request whose client goes after the first event."""
    async with server.client() as client:
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[3]), request_id=name, resumable=True)
        params = request.sampling_params
        params.n, params.max_tokens, params.ignore_eos, params.temperature = OUTPUTS, TOKENS, True, 0.0
        params.logprobs, params.top_logprobs = True, 64
        call = client.stub.Generate(request)
        await call.read()
        call.cancel()


async def test_unread_bytes_of_kept_streams_are_bounded() -> None:
    """Each would take 8 x 150 x 570 bytes."""
    async with kept_server(resume_bytes=BOUND, resume_tenant_bytes=BOUND) as server:
        await asyncio.gather(*(opened(server, f"k{number}") for number in range(STREAMS)))
        most = 0
        async with asyncio.timeout(30):
            while server.engine.live_requests:
                most = max(most, int(server.sample("slipstream_kept_stream_bytes")))
                held = sum(
                    output.logprobs.held_bytes for live in server.engine._live.values() for output in live.outputs
                )
                assert held <= BOUND + STREAMS * OUTPUTS * FREE_TOKENS * 600
                await asyncio.sleep(0)
        assert BOUND // 2 < most <= BOUND, "counted before it is held"
        gone = {how: server.sample("slipstream_kept_streams_gone_total", how=how) for how in ("stalled", "evicted")}
        assert gone["stalled"] and sum(gone.values()) < 2 * STREAMS
        async with server.client() as client:
            reasons = [(await refusal(client, f"k{number}"))[1] for number in range(STREAMS)]
            assert set(reasons) & {"SLOW_CONSUMER", "STREAM_EVICTED"}, reasons


async def test_a_reader_that_comes_back_in_time_gets_all_of_it() -> None:
    async with kept_server() as server, server.client() as client:
        call, seen = await begun(client, "back", 400, logprobs=True, top_logprobs=5)
        call.cancel()
        async with asyncio.timeout(30):
            while server.sample("slipstream_kept_stream_bytes") < STREAM_BYTES + 150 * 5 * 8:
                await asyncio.sleep(0)
        again = await rest(client, "back", seen)
        assert len(again.ids[0]) == 400
        whole = await rest(client, "back", Seen())
        assert whole.ids == again.ids
        assert server.sample("slipstream_kept_stream_bytes") > STREAM_BYTES + 400 * 5 * 8
