"""A frame that cannot be read: one of a call ends that call with a typed error, one of no call ends the connection."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from core.errors import EngineDead, RequestFailed
from core.types.io import Delta, GenerateRequest, TokenLogprob
from core.types.sampling_params import SamplingParams
from service.frontends import wire
from service.frontends.events import EventBatch
from service.frontends.host import FRAME_BYTES
from service.frontends.wire import Kind, pack, pack_json
from service.limits.work import Work
from tests.support.engines import started
from tests.support.fakes.fake_engine import FakeEngine
from tests.support.kept_server import small_engine
from tests.support.until import PATIENCE, until
from tests.support.within import within
from tests.unit.service.frontends.test_host import Connected, told
from tests.unit.service.frontends.test_pair import Pair, paired

MOST_TOKENS = 4000
ENDED = "it was aborted, and has not come to its end"
GARBAGE = b"\x00{no json"


class News:
    """A stream of the engine that has news when the test says so."""

    open_outputs, ended, closed = 1, False, False

    def __init__(self, news: list[Delta]) -> None:
        self.news = news

    def watch(self, ready: Callable[[], None]) -> None:
        """See `PolledStream`."""
        self.ready = ready
        ready()

    def poll(self) -> Delta | None:
        """See `PolledStream`."""
        return self.news.pop() if self.news else None

    async def aclose(self) -> None:
        """See `OutputStream`."""
        self.closed = True


def follow(front: Connected, streams: dict[int, News]) -> None:
    """As if the front end had asked for the streams by these numbers."""
    for number, stream in streams.items():
        held: Any = stream
        front.host._streams[number] = held
        stream.watch(partial(front.host._mark, number))


@asynccontextmanager
async def two_streams() -> AsyncIterator[tuple[Pair, Any, Any, Any]]:
    """A pair, two streams through it that have begun, and the engine that makes them."""
    sampling = SamplingParams(max_tokens=MOST_TOKENS, temperature=0.0, ignore_eos=True)
    async with started(small_engine()) as engine, paired(engine) as pair:
        streams = [
            await pair.remote.generate(GenerateRequest(name, token_ids=(5, 6, 7), sampling=sampling, want_text=False))
            for name in ("broken", "whole")
        ]
        for stream in streams:
            await anext(stream)
        yield pair, *streams, engine


async def ends_alone(pair: Pair, broken: Any, whole: Any, engine: Any) -> None:
    """The one fails as a request does, in the engine too; the other goes on over the same connection."""
    async with within(PATIENCE, "the stream whose frame is broken ends"):
        with pytest.raises(RequestFailed):
            async for _ in broken:
                pass
    await until(lambda: engine.live_requests == 1)
    assert engine.stats.step < MOST_TOKENS, ENDED
    assert isinstance(await anext(whole), Delta)
    assert not pair.host.lost and not pair.remote.closing.done()


def frame_of(number: int, text: bytes) -> bytes:
    """An EVENTS frame with one delta of stream `number`, whose text is `text`."""
    batch = EventBatch()
    batch.add(number, Delta(0, 1, (4,), "x" * len(text)))
    return batch.frame().replace(b"x" * len(text), text)


async def test_a_text_that_is_none_ends_its_stream_alone() -> None:
    async with two_streams() as (pair, broken, whole, engine):
        pair.host.link.send(frame_of(1, b"\xff\xfe\xff\xfe"))
        await ends_alone(pair, broken, whole, engine)


@pytest.mark.parametrize("value", [{"index": 0}, {"nonsense": 1}, 7, None], ids=repr)
async def test_an_end_that_is_none_ends_its_stream_alone(value: Any) -> None:
    batch = EventBatch()
    batch.end(1, "finished", value)
    async with two_streams() as (pair, broken, whole, engine):
        pair.host.link.send(batch.frame())
        await ends_alone(pair, broken, whole, engine)


@pytest.mark.parametrize("body", [GARBAGE, b"[]", b"{}", b'{"error": 5}', b'{"error": "InvalidRequest"}'])
async def test_a_reply_that_is_none_fails_its_call_alone(body: bytes) -> None:
    async with paired(FakeEngine()) as pair:
        asked = asyncio.ensure_future(pair.remote.call("tokenize", text="a", special=True, caller=""))
        await asyncio.sleep(0)
        pair.host.link.send(pack(Kind.REPLY, body, pair.remote._number))
        async with within(PATIENCE, "the call is answered"):
            with pytest.raises((RequestFailed, RuntimeError)):
                await asked
        assert await pair.remote.tokenize("a")


async def test_what_a_reply_that_is_none_tells_of_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The place was taken in the engine's process, and the front end has nothing to give it back with."""
    async with paired(FakeEngine()) as pair:
        send = pair.host.link.send
        monkeypatch.setattr(pair.host.link, "send", lambda _: send(pack(Kind.REPLY, b"{", pair.remote._number)))
        async with within(PATIENCE, "the call is answered"):
            with pytest.raises(RequestFailed):
                await pair.remote.entered("alice", None, Work())
        monkeypatch.undo()
        await pair.settle()
        assert pair.desk.left == ["alice"]


@pytest.mark.parametrize("body", [GARBAGE, b"[]", b"{}", b'{"method": "nonesuch"}', b"[" * 100_000])
async def test_a_call_that_is_none_is_answered_and_its_neighbours_go_on(body: bytes) -> None:
    front = Connected(FakeEngine())
    front.host.link.data_received(pack(Kind.CALL, body, 7))
    front.call(8, "tokenize", text="a", special=True, caller="")
    await until(lambda: front.replies() == 2)
    (first,) = [json.loads(each) for each in front.wire.replies_to(7)]
    assert first["error"] == "RequestFailed"
    assert "ok" in json.loads(front.wire.replies_to(8)[0]) and not front.losses


@pytest.mark.parametrize("body", [GARBAGE, b'{"used":Infinity}'])
async def test_an_end_with_a_broken_body_ends_its_call_all_the_same(body: bytes) -> None:
    front = Connected(FakeEngine())
    streams = {1: News([]), 2: News([])}
    follow(front, streams)
    try:
        front.host.link.data_received(pack(Kind.END, body, 1))
    except NotImplementedError:
        pytest.fail("the link is cut")
    await until(lambda: streams[1].closed)
    assert not front.losses and not streams[2].closed


async def test_counts_that_are_none_are_left_out() -> None:
    front = Connected(FakeEngine())
    for body in (GARBAGE, b"{}", b'[["nonesuch", [], 1]]', b'[["started", ["a", "b", "c"], 1]]'):
        front.host.link.data_received(pack(Kind.COUNTS, body))
    front.call(1, "tokenize", text="a", special=True, caller="")
    await until(lambda: front.replies() == 1)


async def test_a_token_that_no_frame_can_hold_ends_its_stream_alone() -> None:
    """The engine is what errs here: its other streams of the same step are told as ever."""
    front = Connected(FakeEngine())
    bad, good = News([Delta(0, 0, (-1,))]), News([Delta(0, 0, (5,), "five")])
    follow(front, {1: bad, 2: good})
    await until(lambda: bool(front.wire.events()))
    deltas, after = told(front.wire.events()[0])
    assert deltas == [Delta(0, 0, (5,), "five")]
    assert [(number, kind) for number, kind, _ in after] == [(1, "error")]
    await until(lambda: bad.closed)
    assert not good.closed and 2 in front.host._streams


def test_what_cannot_be_told_of_a_stream_leaves_nothing_in_the_frame() -> None:
    batch = EventBatch()
    good = Delta(0, 3, (4,), "t", (TokenLogprob(4, -0.5, ((4, -0.5),)),))
    for bad in (
        Delta(0, 0, (-1,)),
        Delta(-1, 0, (1,)),
        Delta(0, 0, (1,), "t", (TokenLogprob(2**32, -1.0),)),
        Delta(0, 0, (1,), "t", (TokenLogprob(1, -1.0, ((1, None),)),)),  # type: ignore[arg-type]
    ):
        with pytest.raises((OverflowError, TypeError, struct.error)):
            batch.add(1, bad)
    with pytest.raises(TypeError):
        batch.end(1, "finished", object())
    batch.add(2, good)
    alone = EventBatch()
    alone.add(2, good)
    assert batch.frame() == alone.frame()


@pytest.mark.parametrize(
    "frame",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        wire._HEADER.pack(0, wire.VERSION + 1, Kind.BEAT, 0),
        wire._HEADER.pack(0, wire.VERSION, 99, 0),
        wire._HEADER.pack(wire.MAX_BODY_BYTES + 1, wire.VERSION, Kind.CALL, 1),
        pack(Kind.STATE),
    ],
    ids=["no frame", "another version", "unknown kind", "too long", "not for this end"],
)
async def test_a_broken_envelope_ends_the_connection_and_what_a_front_end_had(frame: bytes) -> None:
    async with two_streams() as (pair, _, _, engine):
        # What came behind it is not looked at.
        pair.host.link.data_received(frame + pack_json(Kind.CALL, {"method": "tokenize"}, 50))
        await until(lambda: pair.host.lost)
        await until(lambda: not engine.live_requests)
        assert engine.stats.step < MOST_TOKENS, ENDED
        assert not pair.host._calls
        assert await asyncio.wait_for(pair.remote.closing, PATIENCE), "the front end goes"


@pytest.mark.parametrize("frame", [pack(Kind.STATE, GARBAGE), pack(Kind.EVENTS, GARBAGE), pack(Kind.CALL, b"{}")])
async def test_a_front_end_that_cannot_read_what_concerns_all_goes(frame: bytes) -> None:
    async with two_streams() as (pair, one, other, engine):
        pair.host.link.send(frame)
        assert await asyncio.wait_for(pair.remote.closing, PATIENCE)
        for stream in (one, other):
            with pytest.raises(EngineDead):
                async for _ in stream:
                    pass
        await until(lambda: not engine.live_requests)
        assert engine.stats.step < MOST_TOKENS, ENDED


async def test_frames_are_bounded_and_streams_wait_for_room() -> None:
    """What many streams have for a front end that did not read is far more than a frame should hold."""
    front = Connected(FakeEngine())
    streams = {number: News([Delta(0, 0, (5,), "x" * (FRAME_BYTES // 2))]) for number in range(1, 9)}
    follow(front, streams)
    await until(lambda: len(front.wire.events()) >= 2)
    front.wire.on_write = front.host.link.pause_writing
    bodies = front.wire.events()
    assert max(map(len, bodies)) < 2 * FRAME_BYTES
    await until(lambda: not front.host._ready)
    assert sorted(d.position for body in front.wire.events() for d in told(body)[0]) == [0] * len(streams)
    for stream in streams.values():
        stream.news.append(Delta(0, 1, (6,), "y" * (FRAME_BYTES // 2)))
        stream.ready()
    before = len(front.wire.events())
    await until(lambda: len(front.wire.events()) > before)
    assert len(front.wire.events()) == before + 1 and front.host._ready, "full after one frame: the others wait"


def test_a_frame_that_no_peer_would_take_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_BODY_BYTES", 10)
    with pytest.raises(wire.WireError):
        pack(Kind.REPLY, bytes(11))


async def test_a_reply_that_no_frame_can_hold_fails_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_BODY_BYTES", 300)
    async with paired(FakeEngine()) as pair:
        async with within(PATIENCE, "the call is answered"):
            with pytest.raises(RuntimeError):
                await pair.remote.detokenize([5] * 100)
        assert await pair.remote.detokenize([5])
