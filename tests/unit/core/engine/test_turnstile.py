"""Readers of streams run a few in a pass of the event loop, in order; what comes for those in line is merged there."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from typing import Any

from core.engine.streams.output_processor import OutputProcessor
from core.engine.streams.pending_output import PendingOutput
from core.engine.streams.reader_turns import Turnstile
from core.engine.streams.token_stream import TokenStream
from core.scheduler.intake import Intake
from core.text.failures import TextFailures
from core.types.io import Delta, Started

WIDTH = 4


class Passes:
    """Counts the passes of the loop: a callback that asks for the next pass in every one."""

    def __init__(self) -> None:
        self.number = 0
        self._next = asyncio.get_running_loop().call_soon(self._count)

    def _count(self) -> None:
        self.number += 1
        self._next = asyncio.get_running_loop().call_soon(self._count)

    def stop(self) -> None:
        self._next.cancel()


def made_streams(count: int) -> list[TokenStream]:
    turnstile = Turnstile(WIDTH)
    processor = OutputProcessor(Intake(), lambda: None, 100, lambda _: None, TextFailures())
    return [
        processor.stream(Started(str(i), 1), [PendingOutput(0, None, None)], lambda _: None, turnstile)
        for i in range(count)
    ]


def push(stream: TokenStream, token: int) -> None:
    output = stream.outputs[0]
    output.push(token, textless=False, match_stops=False)
    stream.notify(output)


async def started(streams: list[TokenStream]) -> None:
    for stream in streams:
        stream.begin()
        assert isinstance(await anext(stream), Started)


async def test_a_step_for_many_lets_few_read_in_one_pass() -> None:
    streams = made_streams(5 * WIDTH)
    await started(streams)
    reads: list[tuple[int, int]] = []

    async def read(stream: TokenStream) -> None:
        await anext(stream)
        reads.append((passes.number, int(stream.request_id)))

    readers = [asyncio.create_task(read(stream)) for stream in streams]
    await asyncio.sleep(0)
    passes = Passes()
    for stream in streams:
        push(stream, 7)
    await asyncio.gather(*readers)
    passes.stop()
    assert max(Counter(number for number, _ in reads).values()) == WIDTH
    assert [stream for _, stream in reads] == list(range(len(streams)))


async def test_readers_who_come_back_at_once_stand_in_line_too() -> None:
    """A write that returns at once must not be a way around the line."""
    streams = made_streams(3 * WIDTH)
    await started(streams)
    reads: Counter[int] = Counter()

    async def read(stream: TokenStream) -> None:
        for token in range(5):
            push(stream, token)
            await anext(stream)
            reads[passes.number] += 1

    passes = Passes()
    await asyncio.gather(*(read(stream) for stream in streams))
    passes.stop()
    # A pass ends one budget and begins the next, in whatever order its callbacks stand.
    assert sum(reads.values()) == 5 * len(streams) and max(reads.values()) <= 2 * WIDTH


async def test_tokens_for_a_reader_in_line_are_merged() -> None:
    streams = made_streams(WIDTH + 1)
    await started(streams)
    readers = [asyncio.create_task(anext(stream)) for stream in streams]
    await asyncio.sleep(0)
    for token in (7, 8):
        for stream in streams:
            push(stream, token)
        await asyncio.sleep(0)
    deltas = await asyncio.gather(*readers)
    assert [delta.token_ids for delta in deltas if isinstance(delta, Delta)] == [(7,)] * WIDTH + [(7, 8)]


async def test_a_reader_that_gives_up_in_line_holds_up_nobody() -> None:
    trouble: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: trouble.append(context))
    streams = made_streams(3 * WIDTH)
    await started(streams)
    readers = [asyncio.create_task(anext(stream)) for stream in streams]
    await asyncio.sleep(0)
    for stream in streams:
        push(stream, 7)
    for gone in readers[WIDTH : 2 * WIDTH]:
        gone.cancel()
    async with asyncio.timeout(10):
        done = await asyncio.gather(*readers, return_exceptions=True)
    assert sum(isinstance(each, Delta) for each in done) == 2 * WIDTH and not trouble
    again = streams[WIDTH]
    with contextlib.suppress(asyncio.CancelledError):
        assert isinstance(await anext(again), Delta)
