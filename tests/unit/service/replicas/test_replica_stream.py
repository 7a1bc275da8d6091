"""One request of a replica: read by polling as by waiting, counted in one room, in its engine's book until it ends."""

from __future__ import annotations

import asyncio

import pytest

from core.engine.streams.unread import UnreadBytes
from core.errors import EngineDead, Overloaded, SlowConsumer
from core.types.io import Delta, EmbedRequest, GenerateRequest, OutputEvent, Started
from core.types.sampling_params import SamplingParams
from service.replicas.prompt_pieces import Prompt
from service.replicas.replica_stream import ReplicaStream
from service.replicas.router import Book, Share
from tests.support.fakes.fake_engine import FakeEngine, finished, held
from tests.support.until import until
from tests.unit.service.replicas.rig import replicas


class Rig:
    """A stream, and what it did."""

    def __init__(self, outputs: int = 1, most: int = 10_000) -> None:
        self.book, self.room = Book(), UnreadBytes()
        self.ended: list[str] = []
        self.aborted = 0
        request = GenerateRequest("r", token_ids=(1, 2), sampling=SamplingParams(n=outputs), adapter="a")
        share = Share(self.book, outputs, Prompt((), 2), 2)
        self.stream = ReplicaStream(
            request, self._abort, most, self.room, share, lambda stream: self.ended.append(stream.request_id)
        )

    def _abort(self) -> None:
        self.aborted += 1

    @property
    def empty(self) -> bool:
        """Whether nothing is in the book."""
        return (self.book.rows, self.book.prefill, self.book.held) == (0, 0, 0)

    def polled(self) -> list[OutputEvent]:
        """All events that are there."""
        found = []
        while (event := self.stream.poll()) is not None:
            found.append(event)
        return found


def test_events_are_polled_in_order_and_merged_while_they_wait() -> None:
    rig, seen = Rig(), []
    rig.stream.watch(lambda: seen.append(rig.polled()))
    rig.stream.push(Started("r", 2))
    rig.stream.push(Delta(0, 0, (5,)))
    assert seen == [[], [Started("r", 2)], [Delta(0, 0, (5,))]]
    rig.stream.watch(lambda: None)
    for place in (1, 2):
        rig.stream.push(Delta(0, place, (5 + place,)))
    assert rig.polled() == [Delta(0, 1, (6, 7))] and not rig.stream.ended


def test_the_watcher_sees_the_last_end() -> None:
    rig, open_outputs = Rig(2), []
    rig.stream.watch(lambda: open_outputs.append(rig.stream.open_outputs))
    for index in range(2):
        rig.stream.push(finished(index, 1))
        rig.stream.output_finished()
    assert open_outputs[-1] == 0 and rig.ended == ["r"]
    assert rig.polled() == [finished(0, 1), finished(1, 1)] and rig.stream.ended


def test_an_error_comes_once_and_behind_what_was_there() -> None:
    rig = Rig()
    rig.stream.push(Delta(0, 0, (5,)))
    rig.stream.fail(EngineDead("gone"))
    rig.stream.fail(EngineDead("again"))
    assert rig.stream.open_outputs == 0 and rig.ended == ["r"] and rig.empty
    assert rig.stream.poll() == Delta(0, 0, (5,))
    with pytest.raises(EngineDead, match="gone"):
        rig.stream.poll()
    assert rig.stream.poll() is None and rig.stream.ended


def test_the_book_follows_the_request_until_it_ends() -> None:
    rig = Rig()
    assert (rig.book.rows, rig.book.prefill, rig.book.held) == (1, 2, 2)
    assert rig.stream.info()[:4] == ("r", "waiting", 0, 0)
    rig.stream.push(Started("r", 7))
    rig.stream.push(Delta(0, -2, (1, 2)))
    assert (rig.book.prefill, rig.book.held) == (2, 7), "tokens of the prompt are told before it is computed"
    rig.stream.push(Delta(0, 0, (5, 6)))
    assert (rig.book.rows, rig.book.prefill, rig.book.held) == (1, 0, 9)
    assert rig.stream.info()[:4] == ("r", "decode", 7, 2) and rig.stream.info().adapter == "a"
    assert not rig.stream.over


async def test_closing_ends_the_request_once() -> None:
    rig = Rig()
    await rig.stream.aclose()
    await rig.stream.aclose()
    assert rig.aborted == 1 and rig.ended == ["r"] and rig.empty and rig.stream.over and rig.stream.ended
    whole = Rig()
    whole.stream.push(finished(0, 1))
    whole.stream.output_finished()
    await whole.stream.aclose()
    assert whole.aborted == 0 and whole.ended == ["r"]


def test_a_reader_that_is_too_slow_is_out_of_the_book() -> None:
    rig = Rig(most=3)
    for place in range(5):
        rig.stream.push(Delta(0, place, (5,)))
    assert rig.aborted == 1 and rig.ended == ["r"] and rig.empty
    with pytest.raises(SlowConsumer):
        rig.polled()


def test_unread_bytes_move_to_another_room() -> None:
    rig, other = Rig(), UnreadBytes()
    for place in range(200):
        rig.stream.push(Delta(0, place, (5,)))
    held = rig.room.bytes
    assert held > 0
    rig.stream.count_unread(other)
    assert (rig.room.bytes, other.bytes) == (0, held)
    rig.polled()
    assert other.bytes == 0


async def test_vectors_come_from_one_and_end_there() -> None:
    async with replicas(make=lambda _: FakeEngine()) as rig:
        call = await rig.replicas.embed(EmbedRequest(("a", "b"), request_id="e"))
        assert rig.replicas.live_requests == 1 and rig.replicas.open_streams.oldest(1)[0].request_id == "e"
        assert len((await call.result()).embeddings) == 2
        assert rig.replicas.live_requests == 0
        await call.aclose()
        gate = asyncio.Event()
        for engine in rig.engines.values():
            engine.script = held(gate, after=0)  # type: ignore[attr-defined]
        closed = await rig.replicas.embed(EmbedRequest(("a",), request_id="c"))
        assert sum(engine.live_requests for engine in rig.engines.values()) == 1
        await closed.aclose()
        await until(lambda: not any(engine.live_requests for engine in rig.engines.values()))
        assert rig.replicas.live_requests == 0
        for engine in rig.engines.values():
            engine.refuse_with = Overloaded("full", reason="QUEUE_FULL")  # type: ignore[attr-defined]
        with pytest.raises(Overloaded):
            await rig.replicas.embed(EmbedRequest(("a",), request_id="d"))
        assert all((book.rows, book.held) == (0, 0) for book in rig.replicas._router.books)
