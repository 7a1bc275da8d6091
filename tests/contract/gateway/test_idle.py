"""Gateways ping between calls; a server that minds closes their connection after the third ping."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest

from tests.contract.gateway.spoken import Spoken
from tests.support.servers import Serve

PING_MS = 11_000
PINGS = 4
OPTIONS = (
    ("grpc.keepalive_time_ms", PING_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)


@pytest.mark.soak
async def test_an_idle_connection_that_pings_is_kept(serve: Serve, spoken: Spoken) -> None:
    async with serve() as serving, grpc.aio.insecure_channel(serving.target, options=OPTIONS) as channel:
        stub = spoken.stub(channel)
        await stub.HealthCheck(spoken.pb.HealthCheckRequest())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(PINGS * PING_MS / 1000):
                await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
        assert channel.get_state() is grpc.ChannelConnectivity.READY
