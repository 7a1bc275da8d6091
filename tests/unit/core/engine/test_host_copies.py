"""Copies to host memory through the engine: aborts, deadlines, drain, stop and a lost device, with a copy in flight."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from core.config import MemoryConfig
from core.device.streams import DeviceStreams
from core.engine import host_memory
from core.engine.api import EngineState
from core.engine.async_engine import AsyncEngine
from core.errors import ConfigError
from core.memory import host_bytes
from core.memory.cross.cross_pages import CROSS
from core.memory.host_arena import HostArena
from core.memory.host_moves import CopyOut
from core.memory.recurrent.state_slots import NAME as STATES
from core.memory.window.window_pages import NAME as WINDOW
from core.prefix.tenants import tenant_of
from core.text.tokenizer import Tokenizer
from tests.unit.core.engine.emulation import ask, running
from tests.unit.core.executor.test_landings import Landed

TIGHT: dict[str, Any] = {"max_total_tokens": 96, "page_size": 4, "prefix_cache": "none", "host_cache_bytes": 1 << 16}
THREAD = "slipstream-landings"


class Copies:
    """Every copy lands when the test says so."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.begun: list[Landed] = []
        begin = HostArena.copy_out

        def copy_out(arena: HostArena, out: CopyOut) -> Landed:
            begin(arena, out)
            self.begun.append(Landed())
            return self.begun[-1]

        patch.setattr(HostArena, "copy_out", copy_out)

    def land(self, *, lost: bool = False) -> None:
        for each in self.begun:
            each.lost = lost
            each.fired.set()


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Copies:
    return Copies(monkeypatch)


async def until(holds: Callable[[], Any]) -> None:
    async with asyncio.timeout(20):
        while not holds():
            await asyncio.sleep(0.001)


async def retracted(engine: AsyncEngine, copies: Copies, **rest: Any) -> list[asyncio.Task[Any]]:
    """Readers of requests that the pool cannot hold together; the copies of those that gave way are in flight."""

    async def read(number: int) -> Any:
        stream = await engine.generate(ask((5, 6, number), tokens=60, request_id=f"r{number}", **rest))
        return [event async for event in stream][-1]

    readers = [asyncio.create_task(read(number)) for number in range(3)]
    await until(lambda: copies.begun and engine.stats.leased_pages)
    return readers


def landing_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == THREAD]


async def nothing_is_left(engine: AsyncEngine) -> None:
    await until(lambda: not engine.stats.leased_pages)
    assert engine.stats.host_cache_bytes == 0 and all(pool.used == 0 for pool in engine.stats.pools)


@pytest.mark.parametrize("landed_first", [True, False])
async def test_aborted_requests_give_all_back(tokenizer: Tokenizer, copies: Copies, landed_first: bool) -> None:
    async with running(tokenizer, **TIGHT) as engine:
        readers = await retracted(engine, copies)
        if landed_first:
            copies.land()
        for number in range(3):
            engine.abort(f"r{number}")
        ends = await asyncio.gather(*readers)
        assert "CANCELLED" in {end.reason.name for end in ends}
        copies.land()
        await nothing_is_left(engine)
    assert not landing_threads()


async def test_deadlines_pass_under_a_copy(tokenizer: Tokenizer, copies: Copies) -> None:
    async with running(tokenizer, **TIGHT) as engine:
        readers = await retracted(engine, copies, deadline=time.monotonic() + 0.5)
        await asyncio.gather(*readers, return_exceptions=True)
        assert engine.stats.leased_pages > 0, "the copy still reads them"
        copies.land()
        await nothing_is_left(engine)


async def test_drain_and_stop_end_with_a_copy_in_flight(tokenizer: Tokenizer, copies: Copies) -> None:
    async with running(tokenizer, **TIGHT) as engine:
        readers = await retracted(engine, copies)
        assert landing_threads() == [THREAD]
        await engine.drain(0.01)
        await asyncio.gather(*readers, return_exceptions=True)
        assert engine.live_requests == 0
        stopping = asyncio.create_task(engine.stop())
        await asyncio.sleep(0.02)
        copies.land()
        async with asyncio.timeout(10):
            await stopping
    assert not landing_threads()


async def test_a_device_lost_under_a_copy_ends_the_engine(tokenizer: Tokenizer, copies: Copies) -> None:
    async with running(tokenizer, **TIGHT) as engine:
        readers = await retracted(engine, copies)
        copies.land(lost=True)
        async with asyncio.timeout(10):
            cause = await engine.wait_dead()
        assert str(cause) == "device lost" and engine.state is EngineState.DEAD
        await asyncio.gather(*readers, return_exceptions=True)
    assert not landing_threads()


async def test_without_room_in_host_memory_nothing_of_it_is_made(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No stream, no thread, no memory, no launch, and retracted requests are computed again as ever."""
    made = list[str]()
    draw = DeviceStreams._draw_distinct
    monkeypatch.setattr(
        DeviceStreams, "_draw_distinct", lambda self, *others: made.append("stream") or draw(self, *others)
    )
    for name in ("__init__", "copy_out", "copy_back"):
        monkeypatch.setattr(HostArena, name, lambda *_, name=name: made.append(name))
    async with running(tokenizer, **{**TIGHT, "host_cache_bytes": 0}) as engine:
        streams = [await engine.generate(ask((5, 6, number), tokens=60)) for number in range(3)]
        for stream in streams:
            assert [event async for event in stream]
        assert engine.stats.preemptions > 0 and engine.stats.rejoined_requests == 0
        assert engine._scheduler.host_cache is None
    assert made == ["stream"], "that of results"
    assert not landing_threads()


@pytest.mark.parametrize(
    ("held", "said"),
    [
        ([STATES, WINDOW], "recurrent states, a pool of window layers"),
        ([WINDOW, "adapters"], "a pool of window layers"),
        ([CROSS], "keys of an encoder"),
        (["adapters"], ""),
    ],
)
def test_what_no_copy_has_is_named_once(held: list[str], said: str, caplog: pytest.LogCaptureFixture) -> None:
    beside = host_memory.not_copied(held)
    with caplog.at_level(logging.WARNING, host_memory.__name__):
        found = host_memory.build_host_memory(
            MemoryConfig(host_cache_bytes=1 << 20), 64, beside, tenant_of, rejoins=True
        )
        assert host_memory.build_host_memory(MemoryConfig(), 64, ["anything"], tenant_of, rejoins=True) is None
    assert (found is None) == bool(said)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == bool(said) and all(each.endswith(f"also hold {said}") for each in told)


def test_room_that_the_machine_has_not_is_refused_by_field(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="host_cache_bytes must be at least 0"):
        MemoryConfig(host_cache_bytes=-1)
    monkeypatch.setattr(host_bytes, "available_memory", lambda: 1 << 20)
    with pytest.raises(ConfigError, match="host_cache_bytes: 4194304 bytes are needed, 1048576 of"):
        host_bytes.host_bytes(monkeypatch, 1 << 22, torch.device("cpu"))
    assert host_bytes.host_bytes(monkeypatch, 1 << 20, torch.device("cpu")).nbytes == 1 << 20
    with pytest.raises(ConfigError, match="host_cache_bytes: 1000000000000000 bytes are needed"):
        host_memory.build_host_memory(MemoryConfig(host_cache_bytes=10**15), 64, [], None, rejoins=True)


def test_a_flush_of_a_tenant_is_of_its_namespaces() -> None:
    """Which are told by the adapters of the engine, not by the salt alone."""
    given = MemoryConfig(page_size=16, host_cache_bytes=1 << 20, host_cache_chunk=16)
    found = host_memory.build_host_memory(given, 64, [], lambda salt: salt[0], rejoins=True)
    assert found is not None and found.prefixes is not None
    for salt in ("ax", "bx"):
        found.prefixes.extend(np.arange(16), salt)
    assert found.prefixes.flush("a") == 16 and found.prefixes.tokens == 16


def test_a_chunk_that_never_fits_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    given = MemoryConfig(page_size=16, host_cache_bytes=1 << 20, host_cache_chunk=1 << 20)
    assert host_memory.build_host_memory(given, 64, [], tenant_of, rejoins=True) is not None
    assert "no prefix is kept in host memory: 1048576 tokens (host_cache_chunk)" in caplog.text


def test_chunks_are_whole_pages_and_only_where_prefixes_are_kept() -> None:
    given = MemoryConfig(page_size=16, host_cache_bytes=1 << 20, host_cache_chunk=40)
    found = host_memory.build_host_memory(given, 64, [], tenant_of, rejoins=True)
    assert found is not None and found.prefixes is not None and found.prefixes.chunk == 48
    without = host_memory.build_host_memory(given, 64, [], None, rejoins=True)
    assert without is not None and without.prefixes is None and without.tier.num_blocks == 4
    assert host_memory.build_host_memory(given, 64, [], None, rejoins=False) is None, "nothing would be kept"
    assert host_memory.build_host_memory(given, 0, [], tenant_of, rejoins=True) is None, "a model without keys"
