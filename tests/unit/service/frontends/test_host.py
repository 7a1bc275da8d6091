"""The engine's side of a front end: what waits while the connection is full, and what ends when it is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from core.types.io import Delta, EmbedRequest, GenerateRequest
from core.types.plain import to_plain
from core.types.sampling_params import SamplingParams
from service.engine.handle import EngineHandle
from service.frontends.events import read_events
from service.frontends.host import FrontEndHost
from service.frontends.wire import Kind, Link, pack, pack_json
from service.limits.hold import Hold
from service.limits.work import Work
from service.metrics.rpc import RpcMetrics
from tests.support.engines import started
from tests.support.fakes.brittle_tokenizer import panic
from tests.support.fakes.fake_engine import FakeEngine, held
from tests.support.kept_server import small_engine
from tests.support.until import until


class Wire(asyncio.Transport):
    """The connection to a front end that a test plays; `frames` is what was written, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.frames: list[tuple[Kind, bytes]] = []
        self.numbers: list[int] = []
        """Of the calls that the frames are of."""
        self.on_write: Callable[[], None] = lambda: None
        self._reader = Link(self._frame, lambda: None)

    def _frame(self, kind: Kind, number: int, body: bytes) -> None:
        self.frames.append((kind, body))
        self.numbers.append(number)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """The test says when it is full."""

    def is_closing(self) -> bool:
        """Never: the test says when it is lost."""
        return False

    def write(self, data: Any) -> None:
        """Read at once, as by a front end that keeps up."""
        self._reader.data_received(bytes(data))
        self.on_write()

    def replies_to(self, number: int) -> list[bytes]:
        """Bodies of the REPLY frames of a call."""
        return [body for (kind, body), of in zip(self.frames, self.numbers) if kind is Kind.REPLY and of == number]

    def events(self) -> list[bytes]:
        """Bodies of the EVENTS frames."""
        return [body for kind, body in self.frames if kind is Kind.EVENTS]


class Desk:
    """Lets every call in, and knows which places were given back."""

    def __init__(self) -> None:
        self.left: list[str] = []
        self.used: list[int] = []

    async def enter(self, tenant: str, _deadline: float | None, work: Work) -> Hold:
        """A place, by the tenant's name."""

        def leave(used: int) -> None:
            self.left.append(tenant)
            self.used.append(used)

        return Hold(leave, charge=work.tokens)


class Connected:
    """A host with `engine` behind it and a front end that the test plays before it."""

    def __init__(self, engine: Any) -> None:
        handle = EngineHandle()
        handle.engine = engine
        self.desk, self.wire, self.losses = Desk(), Wire(), list[str]()
        desk: Any = self.desk
        self.host = FrontEndHost(handle, desk, RpcMetrics(CollectorRegistry()), lambda: self.losses.append("lost"))
        self.host.link.connection_made(self.wire)

    def call(self, number: int, method: str, **arguments: Any) -> None:
        """What a front end sends."""
        self.host.link.data_received(pack_json(Kind.CALL, {"method": method, **arguments}, number))

    def replies(self) -> int:
        """How many calls were answered."""
        return sum(kind is Kind.REPLY for kind, _ in self.wire.frames)


def request(tokens: int, name: str = "mine") -> Any:
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    return to_plain(GenerateRequest(name, token_ids=(5, 6, 7), sampling=sampling, want_text=False))


def told(body: bytes) -> tuple[list[Delta], list[Any]]:
    """Deltas and what comes behind them."""
    _, deltas, after = read_events(body)
    return [delta for _, delta in deltas if delta is not None], after


async def test_tokens_wait_in_the_engine_while_the_connection_is_full() -> None:
    """Nothing is written after `pause_writing`; what came meanwhile is one frame, merged, once there is room."""
    async with started(small_engine()) as engine:
        front = Connected(engine)
        front.call(1, "generate", request=request(60))
        await until(lambda: any(told(body)[0] for body in front.wire.events()))
        front.host.link.pause_writing()
        before = front.wire.events()
        await until(lambda: engine.stats.finished["length"] == 1)
        await asyncio.sleep(0)
        assert len(front.wire.events()) == len(before), "written to a connection that is full"
        front.host.link.resume_writing()
        (last,) = front.wire.events()[len(before) :]
        deltas, after = told(last)
        seen = [delta for body in before for delta in told(body)[0]]
        ids = [token for delta in (*seen, *deltas) for token in delta.token_ids]
        assert len(deltas) == 1 and len(ids) == 60 and deltas[0].position == sum(len(d.token_ids) for d in seen)
        assert [(number, kind) for number, kind, _ in after] == [(1, "finished")]


async def test_one_step_of_many_streams_is_one_frame() -> None:
    async with started(small_engine()) as engine:
        front = Connected(engine)
        for number in range(8):
            front.call(number, "generate", request=request(60, f"r{number}"))

        def ends() -> list[int]:
            return [number for body in front.wire.events() for number, kind, _ in told(body)[1] if kind == "finished"]

        await until(lambda: len(ends()) == 8)
        assert sorted(ends()) == list(range(8))
        frames = [told(body)[0] for body in front.wire.events()]
        assert sum(len(delta.token_ids) for deltas in frames for delta in deltas) == 8 * 60
        assert max(map(len, frames)) == 8, "streams that a step reached together"
        assert not front.host._streams, "a stream that has ended is let go of"


async def test_a_front_end_that_is_lost_takes_along_everything_it_had() -> None:
    """Streams, embeddings, calls that were not answered yet, and places in a tenant's gate; once."""
    engine = FakeEngine(held(asyncio.Event(), after=0))
    await engine.start()
    front, other = Connected(engine), Connected(engine)
    for each, name in ((front, "front"), (other, "other")):
        embedding = to_plain(EmbedRequest(((1, 2), (3,)), request_id=f"{name}-embedding"))
        each.call(1, "embed", request=embedding)
        each.call(2, "enter", tenant=name, deadline=None, work=to_plain(Work()))
        await until(lambda each=each: each.replies() == 2)
        each.call(3, "vectors", of=1)
    await until(lambda: set(front.host._calls) == set(other.host._calls) == {3})
    assert engine.live_requests == 2
    front.host.link.connection_lost(None)
    await until(lambda: not front.host._calls)
    closed = {stream.request_id: stream.closed for stream in engine.streams}
    ended, _ = await asyncio.wait([asyncio.ensure_future(closed["front-embedding"].wait())], timeout=2)
    assert ended, "the embedding of a front end that is gone goes on"
    assert not closed["other-embedding"].is_set() and engine.live_requests == 1
    assert (front.desk.left, other.desk.left, front.losses, other.losses) == (["front"], [], ["lost"], [])
    assert front.host.lost and not other.host.lost
    other.host.link.connection_lost(None)
    await until(lambda: not engine.live_requests and not other.host._calls)


@pytest.mark.parametrize("lost", [True, False])
async def test_streams_of_a_lost_front_end_are_aborted(lost: bool) -> None:
    async with started(small_engine()) as engine:
        front = Connected(engine)
        front.call(1, "generate", request=request(5000))
        await until(lambda: front.replies() == 1)
        if lost:
            front.host.link.connection_lost(None)
        else:
            front.host.link.data_received(pack(Kind.END, number=1))
        await until(lambda: not engine.live_requests)
        assert engine.stats.finished["cancelled"] == 1 and front.host.lost == lost


async def test_a_call_that_panics_is_answered() -> None:
    """A panic is no `Exception`; without a reply the front end would wait for as long as its client does."""
    engine: Any = FakeEngine()

    async def panics(*_: object) -> None:
        raise panic()

    engine.tokenize = panics
    front = Connected(engine)
    front.call(1, "tokenize", text="hello", special=True, caller="")
    await until(lambda: 1 not in front.host._calls)
    assert front.replies() == 1
