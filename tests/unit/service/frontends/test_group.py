"""What front ends are told before they start: the port that is held for them, and their part of common limits.

And how soon those that end are started again.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from core.errors import StartupError
from service.config.server_config import ServerConfig
from service.frontends import group as group_room
from service.frontends.front_end import FrontEnd
from service.frontends.group import FIRST_BACKOFF, FrontEndGroup, reserve
from tests.support.fakes.fake_engine import FakeEngine
from tests.support.until import PATIENCE
from tests.support.within import within


async def test_each_front_end_has_its_part_of_limits_that_hold_for_all(config: Callable[..., ServerConfig]) -> None:
    def told(**limits: Any) -> ServerConfig:
        return FrontEndGroup(config(frontends=2, **limits), lambda *_: FakeEngine())._settings()

    limited, free = told(rate_limit=5.0, max_concurrent_requests=3), told()
    assert (limited.rate_limit, limited.max_concurrent_requests) == (2.5, 2)
    assert (free.rate_limit, free.max_concurrent_requests) == (None, None)


def test_a_held_port_is_shared_with_front_ends_and_with_no_other_server() -> None:
    with reserve("127.0.0.1", 0, "gRPC") as held:
        address = held.getsockname()
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(address)
        with socket.socket() as front_end:
            front_end.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            try:
                front_end.bind(address)
            except OSError as error:
                pytest.fail(f"a front end cannot have the port that is held for it: {error}")
            front_end.listen()
            with socket.create_connection(address, timeout=10):
                front_end.settimeout(10)
                front_end.accept()[0].close()


def test_a_port_that_another_server_has_is_refused_by_name() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            StartupError, match=rf"cannot listen on 127\.0\.0\.1:{port} \(gRPC\): Address already in use"
        ):
            reserve("127.0.0.1", port, "gRPC")


async def test_a_port_that_is_taken_late_leaves_no_other_open(
    config: Callable[..., ServerConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taken since the ports were looked at, by another server that starts at the same moment."""
    monkeypatch.setattr("service.frontends.group.check", lambda config: None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        group = FrontEndGroup(config(port=taken.getsockname()[1], frontends=1), lambda *_: FakeEngine())
        with pytest.raises(StartupError, match=r"\(gRPC\)"):
            await group.listen()
    assert group.metrics_port > 0
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", group.metrics_port), timeout=10)


@pytest.mark.parametrize(("long_enough", "times"), [(60.0, [1, 2, 4, 8]), (-1.0, [1, 1, 1, 1])], ids=["early", "late"])
async def test_front_ends_that_die_early_are_started_less_often_and_others_at_once(
    config: Callable[..., ServerConfig], monkeypatch: pytest.MonkeyPatch, long_enough: float, times: list[int]
) -> None:
    monkeypatch.setattr(group_room, "LONG_ENOUGH", long_enough)
    group, pauses, enough = FrontEndGroup(config(frontends=1), lambda *_: FakeEngine()), list[float](), asyncio.Event()

    async def died() -> int:
        return 1

    def dying() -> FrontEnd:
        host: Any = SimpleNamespace(link=SimpleNamespace(heard=0, close=lambda: None))
        process: Any = SimpleNamespace(wait=died)
        return FrontEnd(host, process)

    async def spawn_after(backoff: float, place: int) -> None:
        pauses.append(backoff)
        group._front_ends[place] = dying()
        if len(pauses) == len(times):
            enough.set()
            await asyncio.Event().wait()

    monkeypatch.setattr(group, "_spawn_after", spawn_after)
    group._front_ends[0] = dying()
    keeping = asyncio.create_task(group._keep(0))
    async with within(PATIENCE, "each is replaced"):
        await enough.wait()
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    assert pauses == [FIRST_BACKOFF * each for each in times]
