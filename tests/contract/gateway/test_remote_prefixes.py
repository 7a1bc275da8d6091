"""The prefix cache over the connection between a front end and the engine's process: in pieces, in order, once each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from core.errors import EngineDead, SlowConsumer
from core.types.prefixes import PrefixChange, PrefixRemoved, PrefixStored
from service.engine.handle import EngineHandle
from service.frontends import prefix_watches
from service.frontends.host import FrontEndHost
from service.frontends.remote_engine import RemoteEngine
from service.frontends.remote_prefixes import RemotePrefixWatch
from service.metrics.rpc import RpcMetrics
from tests.support.fakes.fake_engine import FakeEngine
from tests.support.fakes.fake_prefixes import FakeWatch, stored
from tests.support.until import PATIENCE, until
from tests.support.within import within


@dataclass
class Pair:
    """A front end's engine, the real one behind it, and what lies between."""

    remote: RemoteEngine
    engine: FakeEngine
    host: FrontEndHost

    async def watch(self) -> tuple[RemotePrefixWatch, FakeWatch]:
        """The two ends of one watch."""
        return await self.remote.prefixes.watch(""), self.engine.prefixes.watches[-1]


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    loop, engine, handle = asyncio.get_running_loop(), FakeEngine(), EngineHandle()
    handle.engine = engine
    host = FrontEndHost(handle, {}, RpcMetrics(CollectorRegistry()), lambda: None)
    remote = RemoteEngine(1000)
    listening = await loop.create_unix_server(lambda: host.link, str(tmp_path / "link"))
    await loop.create_unix_connection(lambda: remote.link, str(tmp_path / "link"))
    yield Pair(remote, engine, host)
    remote.link.close()
    await until(lambda: host.lost)
    listening.close()


def told(changes: Sequence[PrefixChange]) -> list[object]:
    """Plain values, to compare."""
    return [
        (each.parent, each.ids.tolist(), each.pages.tolist()) if isinstance(each, PrefixStored) else each.pages.tolist()
        for each in changes
    ]


async def test_a_state_comes_in_pieces_and_is_whole(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_watches, "PIECE_PAGES", 4)
    contents = [stored(0, [1, 2, 3]), stored(2, [4]), stored(0, range(5, 15)), stored(0, [20]), stored(20, [21])]
    pair.engine.prefixes.contents[""] = contents
    watch, _ = await pair.watch()
    assert watch.page_size == 4
    assert told(watch.contents) == told(contents)
    # Nothing of what crossed can be changed behind the reader's back, and ids have the type that hashes are made of.
    assert {each.ids.dtype.str for each in watch.contents} == {"<i8"}


async def test_changes_outlast_the_patience_of_their_reader(pair: Pair) -> None:
    watch, inner = await pair.watch()
    for _ in range(3):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await watch.changes()
    first = [stored(0, [1, 2]), PrefixRemoved(stored(0, [2]).pages)]
    inner.queue.put_nowait(first)
    # Read by the call that is out already, so it is on its way, or here, while nobody waits for it.
    await until(inner.queue.empty)
    inner.queue.put_nowait([stored(1, [7])])
    async with within(PATIENCE, "each change is told"):
        assert told(await watch.changes()) == told(first)
        assert told(await watch.changes()) == told([stored(1, [7])])


async def test_who_fell_behind_is_told_now_and_ever_after(pair: Pair) -> None:
    watch, inner = await pair.watch()
    inner.queue.put_nowait(SlowConsumer("too much was left unread"))
    for _ in range(2):
        with pytest.raises(SlowConsumer, match="left unread"):
            await watch.changes()


async def test_closing_lets_the_engine_forget_the_watch_and_who_waits(pair: Pair) -> None:
    (watch, inner), (other, others) = await pair.watch(), await pair.watch()
    waiting = asyncio.create_task(watch.changes())
    await until(lambda: bool(pair.host._calls))
    watch.close()
    watch.close()
    await until(lambda: inner.closed and not pair.host._calls)
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not others.closed
    others.queue.put_nowait([stored(0, [1])])
    assert told(await other.changes()) == told([stored(0, [1])])


async def test_a_front_end_that_dies_takes_its_watches_along(pair: Pair) -> None:
    _, inner = await pair.watch()
    pair.remote.link.close()
    await until(lambda: inner.closed)


async def test_a_reader_learns_that_the_engine_is_gone(pair: Pair) -> None:
    watch, _ = await pair.watch()
    waiting = asyncio.create_task(watch.changes())
    await until(lambda: bool(pair.host._calls))
    pair.host.link.close()
    with pytest.raises(EngineDead):
        await waiting


async def test_a_watch_that_is_given_up_half_way_is_closed(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_watches, "PIECE_PAGES", 1)
    pair.engine.prefixes.contents[""] = [stored(0, [page]) for page in range(1, 200)]
    opening = asyncio.ensure_future(pair.remote.prefixes.watch(""))
    await until(lambda: bool(pair.engine.prefixes.watches))
    opening.cancel()
    await until(lambda: pair.engine.prefixes.watches[0].closed)
