"""The dialects with `--frontends`: everything crosses to the engine's process, whichever front end is asked."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import grpc.aio
import pytest
from smg_grpc_proto.generated import common_pb2

from service.client import CallFailed, SlipstreamClient
from service.client.adapters import AdapterClient
from service.limits.usage import CENSUS_SECONDS
from tests.contract.gateway.spoken import DIALECTS
from tests.contract.gateway.test_kv_events import Index, follow, whole_pages
from tests.support.until import until
from tests.support.within import within
from tests.system.test_frontend_doors import ALICE, BOB, CAROL, group
from tests.system.test_frontends import PATIENCE

IDS = list(range(3, 43))
PAGE = 16
OTHER_IDS = [*IDS[:16], *range(100, 130)]
SHORT = {"max_tokens": 4, "ignore_eos": True, "temperature": 0.0}


async def test_every_call_crosses() -> None:
    async with group(unnamed_callers="all") as server, server.places() as clients, asyncio.timeout(2 * PATIENCE):
        first, second = clients.values()
        for spoken in DIALECTS:
            mine, other = spoken.stub(first.channel), spoken.stub(second.channel)
            assert (await mine.HealthCheck(spoken.pb.HealthCheckRequest())).healthy
            assert (await mine.GetModelInfo(spoken.pb.GetModelInfoRequest())).vocab_size > 0
            chunks = [each async for each in mine.GetTokenizer(common_pb2.GetTokenizerRequest())]
            assert chunks[-1].sha256
            (whole,) = [each.complete async for each in mine.Generate(spoken.generate(IDS, params=SHORT))]
            assert (whole.finish_reason, len(whole.output_ids), whole.prompt_tokens) == ("length", 4, len(IDS))

            # Started at one front end, ended through the other.
            long = spoken.generate(IDS, request_id="r", stream=True, params=SHORT | {"max_tokens": 4000})
            call = mine.Generate(long)
            await call.read()
            (load,) = (await other.GetLoads(spoken.pb.GetLoadsRequest())).loads
            assert load.max_total_num_tokens == 64 * 1024
            await other.Abort(spoken.abort("r"))
            while (response := await call.read()).WhichOneof("response") == "chunk":
                pass
            assert response.complete.finish_reason == "abort"
            assert await call.read() is grpc.aio.EOF
            await until(lambda: not server.engine.live_requests, PATIENCE)

            # Followed at one front end, changed through the other.
            await other.FlushCache(common_pb2.FlushCacheRequest(timeout_s=5))
            events, index = mine.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest()), Index()
            await follow(events, index, set())
            await anext(aiter(mine.Generate(spoken.generate(IDS, params=SHORT | {"max_tokens": 1}))))
            await follow(events, index, whole_pages(IDS, PAGE))
            await anext(aiter(other.Generate(spoken.generate(OTHER_IDS, params=SHORT | {"max_tokens": 1}))))
            await follow(events, index, whole_pages(IDS, PAGE) | whole_pages(OTHER_IDS, PAGE))
            flushed = await other.FlushCache(common_pb2.FlushCacheRequest(timeout_s=5))
            assert flushed.success and int(flushed.message.split()[0]) >= 2
            await follow(events, index, set())
            events.cancel()


async def test_what_is_a_tenants_own_is_so_through_every_front_end(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"alice:{ALICE}\nbob:{BOB}\nops:{CAROL}\n")
    spoken = DIALECTS[0]

    async def told(client: SlipstreamClient, token: str) -> tuple[int, int, str]:
        """Requests that run by both services, and the answer of a flush."""
        bearer = (("authorization", f"Bearer {token}"),)
        stub = spoken.stub(client.channel)
        (load,) = (await stub.GetLoads(spoken.pb.GetLoadsRequest(), metadata=bearer)).loads
        flushed = await stub.FlushCache(common_pb2.FlushCacheRequest(), metadata=bearer)
        return (await client.load()).running_requests, load.num_running_reqs, flushed.message

    async with group(auth_token_file=str(tokens), admins="ops") as server:
        async with server.places(ALICE) as hers, server.places(BOB) as his, server.places(CAROL) as theirs:
            first, second = hers.values()
            await first.complete(IDS, max_tokens=1, ignore_eos=True)
            stream = first.generate(OTHER_IDS, max_tokens=4000, ignore_eos=True)
            await anext(stream)
            await asyncio.sleep(2 * CENSUS_SECONDS)
            found = [await told(client, token) for client, token in ((last(his), BOB), (second, ALICE))]
            async with within(PATIENCE, "the front end hears from the engine that a request runs"):
                while not (seen := await last(theirs).load()).running_requests:
                    await asyncio.sleep(0.01)
            await stream.aclose()
        with pytest.raises(CallFailed) as refused:
            async with server.places(BOB) as his:
                await AdapterClient(last(his)).load("x")
    assert found[0] == (0, 0, "0 pages evicted")
    assert found[1][:2] == (1, 1) and found[1][2].endswith("; what 1 live requests hold stays")
    assert (seen.running_requests, len(seen.pools) > 0) == (1, True)
    assert refused.value.code.name == "PERMISSION_DENIED"


def last(places: Mapping[int, SlipstreamClient]) -> SlipstreamClient:
    """The client of the front end that came last."""
    return list(places.values())[-1]
