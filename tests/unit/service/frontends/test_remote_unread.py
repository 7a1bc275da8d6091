"""In a front end, too, what a client leaves unread is bounded in bytes, and given back when it is read or forgotten."""

from __future__ import annotations

import pytest

from core.engine.streams.unread import MORE_TOKENS, UnreadBytes
from core.errors import SlowConsumer
from core.types.io import Delta, Finished, FinishReason, Timing, TokenLogprob, Usage
from service.frontends.remote_stream import RemoteStream

TOP = tuple((token, -1.0) for token in range(64))
BOUND = 256 * 1024


def pushed(stream: RemoteStream, first: int, count: int) -> None:
    for position in range(first, first + count):
        stream.push(Delta(0, position, (position,), "", (TokenLogprob(position, -1.0, TOP),)))


async def test_a_stream_beyond_its_bytes_ends_and_forgets() -> None:
    ended: list[bool] = []
    room = UnreadBytes(BOUND, 2 * BOUND)
    stream = RemoteStream("r", 1, lambda: ended.append(True), 100_000, room)
    pushed(stream, 0, 2 * MORE_TOKENS)
    assert 2 * MORE_TOKENS * 64 * 8 < room.bytes <= BOUND
    delta = await anext(stream)
    assert isinstance(delta, Delta) and len(delta.logprobs) == 2 * MORE_TOKENS and room.bytes == 0
    pushed(stream, 2 * MORE_TOKENS, BOUND // (64 * 8) + MORE_TOKENS)
    assert ended == [True] and room.bytes == 0
    with pytest.raises(SlowConsumer):
        await anext(stream)


async def test_one_that_is_closed_gives_back_what_was_counted() -> None:
    room = UnreadBytes(BOUND, BOUND)
    stream = RemoteStream("r", 1, lambda: None, 100_000, room)
    pushed(stream, 0, 2 * MORE_TOKENS)
    assert room.bytes
    await stream.aclose()
    assert room.bytes == 0


async def test_a_complete_stream_that_gave_way_ends_with_an_error() -> None:
    """Its client has not read the output: an end without an error would be taken for all of it."""
    room = UnreadBytes(BOUND, BOUND)
    complete, other = (RemoteStream(name, 1, lambda: None, 100_000, room) for name in "ab")
    pushed(complete, 0, 4 * MORE_TOKENS)
    complete.push(Finished(0, FinishReason.LENGTH, Usage(1, 4 * MORE_TOKENS, 0), Timing(0.0, 0.0, 0.0)))
    assert complete.output_finished()
    pushed(other, 0, 3 * MORE_TOKENS)
    assert 0 < room.bytes <= BOUND
    with pytest.raises(SlowConsumer):
        await anext(complete, None)
