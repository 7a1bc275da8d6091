"""Front ends as processes, the engine a fake in this one: what ends a front end has another one start."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from service.client import SlipstreamClient
from service.config.server_config import ServerConfig
from service.frontends import front_end as front_end_room
from service.frontends import group as group_room
from service.frontends.front_end import FrontEnd
from service.frontends.group import FrontEndGroup
from tests.support.fakes.fake_engine import FakeEngine
from tests.support.servers import loaded
from tests.support.within import within

PATIENCE = 60.0
GARBAGE = b"GET / HTTP/1.1\r\n\r\n"


@asynccontextmanager
async def running(config: Callable[..., ServerConfig]) -> AsyncIterator[FrontEndGroup]:
    async with loaded(FrontEndGroup(config(frontends=1), lambda *_: FakeEngine())) as group:
        yield group


async def replaced(group: FrontEndGroup, old: FrontEnd) -> None:
    """The process is gone, and calls are answered by another one."""
    async with within(PATIENCE, "another front end starts"):
        await old.process.wait()
        while group._front_ends[0] is old:
            await asyncio.sleep(0.01)
        (new,) = group._running()
        await new.host.serving.wait()
    assert old.host.lost and not new.host.lost
    async with SlipstreamClient(f"127.0.0.1:{group.port}") as client:
        assert await client.tokenize("a")


def to_front_end(old: FrontEnd) -> None:
    old.host.link.send(GARBAGE)


def from_front_end(old: FrontEnd) -> None:
    old.host.link.data_received(GARBAGE)


@pytest.mark.parametrize("broken", [to_front_end, from_front_end])
async def test_a_connection_that_is_cut_ends_the_front_end_and_another_one_starts(
    config: Callable[..., ServerConfig], broken: Callable[[FrontEnd], None]
) -> None:
    async with running(config) as group:
        (old,) = group._running()
        broken(old)
        await replaced(group, old)
        assert old.process.returncode == 1, "it left by itself"


async def test_a_front_end_that_never_listens_is_killed(
    config: Callable[..., ServerConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(config) as group:
        (first,) = group._running()
        monkeypatch.setattr(front_end_room, "START_SECONDS", 1.0)
        first.kill()
        async with within(PATIENCE, "another front end is begun"):
            while group._front_ends[0] is first:
                await asyncio.sleep(0)
        (second,) = group._running()
        os.kill(second.process.pid, signal.SIGSTOP)
        assert not second.host.listening.is_set()
        ended, _ = await asyncio.wait([asyncio.ensure_future(second.process.wait())], timeout=PATIENCE / 3)
        second.kill()
        assert ended, "one that is stopped before it listens is killed"
        monkeypatch.undo()
        await replaced(group, second)


async def test_a_machine_without_room_for_a_process_is_asked_again(
    config: Callable[..., ServerConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    start, refusals, asked = group_room.create_subprocess_exec, iter(range(2)), list[float]()

    async def refused(*command: Any, **options: Any) -> Any:
        asked.append(time.monotonic())
        if next(refusals, None) is not None:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return await start(*command, **options)

    async with running(config) as group:
        (old,) = group._running()
        monkeypatch.setattr(group_room, "create_subprocess_exec", refused)
        monkeypatch.setattr(group_room, "LONGEST_BACKOFF", 0.1)
        old.kill()
        await replaced(group, old)
    assert next(refusals, None) is None
    pauses = [after - before for before, after in pairwise(asked)]
    assert len(pauses) == 2 and min(pauses) >= 0.1, "a machine without room is not asked in a busy loop"


def test_a_front_end_that_has_ended_is_not_killed_again(caplog: pytest.LogCaptureFixture) -> None:
    """It stays in its place until another one has started; its silence is no news."""
    host, process = SimpleNamespace(link=SimpleNamespace(heard=0), listening=asyncio.Event()), SimpleNamespace()
    host.listening.set()
    ended = FrontEnd(host, process)  # type: ignore[arg-type]
    process.pid, process.returncode, process.kill = 0, -signal.SIGKILL, lambda: None
    with caplog.at_level(logging.ERROR):
        for look in range(100):
            ended.look(ended.since + look)
    assert not caplog.records
