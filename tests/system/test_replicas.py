"""Engines in processes of their own: what is killed or frozen takes its own streams along, and no process is left."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest

from service.client import CallFailed, Chunk, SlipstreamClient
from tests.chaos.process import PATIENCE, ServerProcess
from tests.support.until import until

LONG = {"max_tokens": 1800, "temperature": 0.0, "ignore_eos": True, "want_text": False}
SILENT = 40.0
"""Seconds within which a frozen process is found, killed and replaced: 30 of silence, and a start."""


@contextmanager
def of_two_engines(**settings: Any) -> Iterator[ServerProcess]:
    """The real server, which serves; none of its engines outlives it."""
    started = ServerProcess(program="service", data_parallel=2, drain_grace=20, **settings)
    children: list[psutil.Process] = []
    try:
        started.wait_ready()
        children = engines(started)
        yield started
    finally:
        if started.process.poll() is None:
            children = engines(started)
        started.close()
        _, left = psutil.wait_procs(children, timeout=PATIENCE)
        assert not left, "engines outlived their server"


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    """With the bundled model."""
    with of_two_engines() as started:
        yield started


def engines(server: ServerProcess) -> list[psutil.Process]:
    """The engines' processes."""
    return psutil.Process(server.pid).children()


async def begun(client: SlipstreamClient, place: int, tokens: int = 1800) -> asyncio.Task[int]:
    """A stream that has brought its first token; its result is the number of its tokens."""
    first = asyncio.Event()

    async def follow() -> int:
        count = 0
        async for event in client.generate([5 + place, 6, 7], **LONG | {"max_tokens": tokens}):
            if isinstance(event, Chunk):
                count += len(event.token_ids)
                first.set()
        return count

    task = asyncio.create_task(follow())
    await asyncio.wait_for(first.wait(), PATIENCE)
    return task


async def outcomes(tasks: list[asyncio.Task[int]]) -> list[Any]:
    """By task, the number of tokens, or how it failed."""
    found = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 3 * PATIENCE)
    return [f"{each.code.name} {each.reason}" if isinstance(each, CallFailed) else each for each in found]


async def replaced(server: ServerProcess, lost: int) -> None:
    """Return once another process serves in the place of `lost`."""

    async def serves() -> bool:
        metrics = await server.metrics()
        ready = [metrics[f'slipstream_replica_ready{{replica="{name}"}}'] for name in "01"]
        return ready == [1.0, 1.0] and lost not in {child.pid for child in engines(server)}

    # Its successor loads beside whatever else the machine does.
    end = asyncio.get_running_loop().time() + 4 * SILENT
    while not await serves():
        assert asyncio.get_running_loop().time() < end, "no other engine came"
        await asyncio.sleep(0.1)


async def test_an_engine_that_is_killed_loses_its_own_streams_and_a_drain_loses_none(server: ServerProcess) -> None:
    async with server.client() as client:
        tasks = [await begun(client, place) for place in range(4)]
        lost, other = engines(server)
        lost.kill()
        found = await outcomes(tasks)
        assert sorted(map(str, found)) == ["1800", "1800", "UNAVAILABLE ENGINE_DEAD", "UNAVAILABLE ENGINE_DEAD"]
        await replaced(server, lost.pid)
        assert other.is_running()

        tasks = [await begun(client, place) for place in range(4)]
        server.process.send_signal(signal.SIGTERM)
        assert await outcomes(tasks) == [1800] * 4
        assert await asyncio.to_thread(server.process.wait, PATIENCE) == 0


async def test_a_server_that_is_killed_leaves_no_engine(server: ServerProcess) -> None:
    children = engines(server)
    assert len(children) == 2
    server.process.kill()
    _, left = await asyncio.to_thread(psutil.wait_procs, children, PATIENCE)
    assert not left


async def test_a_frozen_engine_is_sent_nothing_and_replaced(server: ServerProcess) -> None:
    async with server.client() as client:
        tasks = [await begun(client, place) for place in range(2)]
        frozen = engines(server)[0]
        frozen.suspend()

        async def silent() -> bool:
            metrics = await server.metrics()
            return (
                metrics['slipstream_replica_ready{replica="0"}'] + metrics['slipstream_replica_ready{replica="1"}'] == 1
            )

        async with asyncio.timeout(PATIENCE):
            while not await silent():
                await asyncio.sleep(0.1)
        for place in range(4):
            stream = await begun(client, place)
            stream.cancel()
        await replaced(server, frozen.pid)
        assert sorted(map(str, await outcomes(tasks))) == ["1800", "UNAVAILABLE ENGINE_DEAD"]


async def test_an_engine_that_is_heard_again_goes_on(server: ServerProcess) -> None:
    async with server.client() as client:
        tasks = [await begun(client, place) for place in range(2)]
        frozen = engines(server)[0]
        frozen.suspend()
        await asyncio.sleep(6.0)
        frozen.resume()
        assert await outcomes(tasks) == [1800] * 2
        await until(lambda: frozen.is_running())
        assert [child.pid for child in engines(server)].count(frozen.pid) == 1
