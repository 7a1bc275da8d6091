"""SIGTERM while a SIGTERM is being heeded: the process ends within seconds, with and without front ends."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter

import psutil
import pytest

from service.client import CallFailed, SlipstreamClient
from tests.chaos.device import Faults
from tests.chaos.process import PATIENCE, ServerProcess

pytestmark = pytest.mark.alone

STREAMS = 8
HANG_AT = 300
SECONDS = 8.0
"""Fewer than an engine gets to stop when the process has time, on two loaded cores."""


async def outcome(client: SlipstreamClient) -> str:
    try:
        async for _ in client.generate([5, 6, 7], max_tokens=6000, temperature=0.0, ignore_eos=True):
            pass
    except CallFailed as failed:
        return failed.code.name
    return "OK"


async def under_way(server: ServerProcess, hangs: bool) -> None:
    """All streams are read, or the device hangs with them."""
    async with asyncio.timeout(PATIENCE):
        while (now := await server.probe()).running < STREAMS or (hangs and now.step < HANG_AT - 2):
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("hangs", [False, True], ids=["decoding", "device hangs"])
@pytest.mark.parametrize("frontends", [0, 2])
async def test_a_second_sigterm_ends_a_drain_under_load(frontends: int, hangs: bool) -> None:
    faults = Faults(step_seconds=0.005, hang_at=HANG_AT if hangs else 0)
    server = ServerProcess(faults, frontends=frontends, max_total_tokens=64 * 1024, drain_linger=1, drain_grace=3600)
    try:
        await asyncio.to_thread(server.wait_ready)
        children = psutil.Process(server.pid).children()
        async with server.client() as client:
            streams = [asyncio.create_task(outcome(client)) for _ in range(STREAMS)]
            await under_way(server, hangs)
            server.send(signal.SIGTERM)
            async with asyncio.timeout(PATIENCE):
                while (await server.metrics()).get("slipstream_drain_seconds", 0.0) == 0.0:
                    await asyncio.sleep(0.02)
            if children:
                # One that does not hear of the drain holds up nothing.
                os.kill(children[0].pid, signal.SIGSTOP)
            for _ in range(2):
                server.send(signal.SIGTERM)
            code, seconds = await server.exit_code(PATIENCE)
            assert Counter(await asyncio.wait_for(asyncio.gather(*streams), PATIENCE)) == {"UNAVAILABLE": STREAMS}
        assert (code, seconds < SECONDS) == (128 + signal.SIGTERM, True), seconds
        _, left = await asyncio.to_thread(psutil.wait_procs, children, PATIENCE)
        assert not left, "front ends outlived the engine's process"
    finally:
        server.close()
