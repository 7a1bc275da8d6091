"""What the engine's process keeps for a front end is given up with what it was for, whenever that goes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from core.types.io import Delta
from service.engine.handle import EngineHandle
from service.frontends.host import FrontEndHost
from service.frontends.wire import Kind, Link, pack, pack_json
from service.metrics.rpc import RpcMetrics
from tests.support.fakes.fake_engine import FakeEngine
from tests.support.until import turns, until


class Sink(asyncio.Transport):
    """A connection on which everything is written at once."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """None are needed."""


class News:
    """A kept stream that has news whenever the test says so."""

    expected, want_text, open_outputs, ended, closed = 1, True, 1, False, False

    def watch(self, ready: Callable[[], None]) -> None:
        self.ready = ready

    def poll(self) -> None:
        """Nothing is there yet."""

    async def aclose(self) -> None:
        self.closed = True


ATTACH = {"method": "attach", "request_id": "r", "positions": {}, "incarnation": ""}


class Desk:
    """Gives the one stream."""

    async def attach(self, request_id: str, positions: dict[int, Any], incarnation: str) -> News:
        return News()


@pytest.fixture
def host() -> FrontEndHost:
    handle = EngineHandle()
    handle.engine = FakeEngine()
    desk: Any = Desk()
    made = FrontEndHost(handle, desk, RpcMetrics(CollectorRegistry()), lambda: None)
    made.link.connection_made(Sink())
    return made


def call(number: int) -> bytes:
    return pack_json(Kind.CALL, {"method": "tokenize", "text": "hello", "special": True, "caller": ""}, number)


async def test_a_call_that_is_given_up_before_its_first_step_leaves_nothing(host: FrontEndHost) -> None:
    """Found by the simulation of the shell (seed 7): both frames came in one read, and the call stayed for ever."""
    host.link.data_received(call(1) + pack(Kind.END, number=1) + call(2))
    await until(lambda: 2 not in host._calls)
    await turns(5)
    assert not host._calls


async def test_a_front_end_that_is_lost_with_calls_at_their_beginning_leaves_nothing(host: FrontEndHost) -> None:
    host.link.data_received(call(1) + call(2))
    host.link.connection_lost(None)
    await turns(5)
    assert not host._calls and host.lost


async def test_a_front_end_that_is_lost_while_its_connection_is_full_leaves_nothing(host: FrontEndHost) -> None:
    """Found by the simulation of the shell (seed 449): streams with news were marked for a write that never came."""
    host.link.data_received(pack_json(Kind.CALL, ATTACH, 1))
    await until(lambda: 1 in host._streams and 1 not in host._calls)
    await turns(5)
    stream = host._streams[1]
    assert isinstance(stream, News)
    host.link.pause_writing()
    stream.ready()
    await turns(5)
    assert host._ready, "it waits for room"
    host.link.connection_lost(None)
    assert not host._ready
    stream.ready()
    await turns(5)
    assert stream.closed and not (host._ready or host._streams or host._calls or host._closing)


async def test_what_a_stream_has_goes_before_a_reply(host: FrontEndHost) -> None:
    """Both are there in one turn of the loop: a reply that came first would tell of an end before the tokens."""
    host.link.data_received(pack_json(Kind.CALL, ATTACH, 1))
    await until(lambda: 1 in host._streams and 1 not in host._calls)
    await turns(5)
    sink, stream, news = Sink(), host._streams[1], [Delta(0, 0, (5,))]
    assert isinstance(stream, News)
    stream.poll = lambda: news.pop() if news else None  # type: ignore[method-assign,assignment]
    host.link.connection_made(sink)
    stream.ready()
    host.send(Kind.REPLY, {"ok": True}, 2)
    await turns(5)
    frames: list[Kind] = []
    Link(lambda kind, *_: frames.append(kind), lambda: None).data_received(sink.written)
    assert frames == [Kind.EVENTS, Kind.REPLY]
