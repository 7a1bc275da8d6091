"""Connections that are old are left one by one, and no call notices."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

from core.types.io import GenerateRequest
from service.client import Chunk, SlipstreamClient
from service.config.server_config import ServerConfig
from service.rpc.channel_options import FOREVER_MS, server_options
from tests.support.fakes.breaking_proxy import breaking_proxy
from tests.support.fakes.fake_engine import FakeEngine, Step, count_up, held
from tests.support.servers import Serve
from tests.support.until import PATIENCE

AGE = 0.3


async def test_clients_connect_again_and_lose_no_call(serve: Serve) -> None:
    later = asyncio.Event()

    def script(request: GenerateRequest) -> Iterator[Step]:
        return (held(later) if request.request_id == "long" else count_up)(request)

    async with serve(FakeEngine(script), max_connection_age=AGE) as serving, asyncio.timeout(PATIENCE):
        async with breaking_proxy(serving.server.port) as proxy, SlipstreamClient(proxy.target) as client:
            long = client.generate("a", request_id="long", max_tokens=4)
            told = [await anext(long)]
            calls = 0
            while proxy.accepted < 4:
                (whole,) = await client.complete("b", max_tokens=2)
                assert len(whole.token_ids) == 2
                calls += 1
            later.set()
            told += [event async for event in long]
            assert proxy.broken == 0
    assert calls > 4
    assert sum(len(event.token_ids) for event in told if isinstance(event, Chunk)) == 4, "begun on the first connection"


async def test_by_default_they_live_half_an_hour_and_with_zero_for_ever(config: Callable[..., ServerConfig]) -> None:
    made = (config(), config(max_connection_age=0))
    ages = [dict(server_options(each))["grpc.max_connection_age_ms"] for each in made]
    assert ages == [1_800_000, FOREVER_MS]
