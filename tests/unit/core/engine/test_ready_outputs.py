"""Outputs of a stream that its reader looks at: each stands there once, as often as it has something new."""

from __future__ import annotations

import pytest

from core.engine.streams.output_processor import OutputProcessor
from core.engine.streams.pending_output import PendingOutput
from core.engine.streams.reader_turns import Turnstile
from core.engine.streams.token_stream import TokenStream
from core.errors import SlowConsumer
from core.scheduler.intake import Intake
from core.text.failures import TextFailures
from core.types.io import Delta, Started


def opened(outputs: int) -> TokenStream:
    processor = OutputProcessor(Intake(), lambda: None, 100, lambda _: None, TextFailures())
    pending = [PendingOutput(index, None, None) for index in range(outputs)]
    stream = processor.stream(Started("r", 1), pending, lambda _: None, Turnstile())
    stream.begin()
    assert isinstance(stream.poll(), Started)
    return stream


def told(stream: TokenStream, output: int, token: int) -> None:
    stream.outputs[output].ids.append(token)
    stream.notify(stream.outputs[output])


def read(stream: TokenStream) -> list[tuple[int, tuple[int, ...]]]:
    found = list[tuple[int, tuple[int, ...]]]()
    while (event := stream.poll()) is not None:
        assert isinstance(event, Delta)
        found.append((event.index, event.token_ids))
    return found


def test_an_output_is_read_once_for_all_it_has_and_again_for_more() -> None:
    stream = opened(3)
    for output, token in ((1, 5), (0, 6), (1, 7)):
        told(stream, output, token)
    assert read(stream) == [(1, (5, 7)), (0, (6,))], "in the order in which they had something first"
    assert read(stream) == []
    for output, token in ((0, 8), (1, 9), (2, 10), (0, 11)):
        told(stream, output, token)
    assert read(stream) == [(0, (8, 11)), (1, (9,)), (2, (10,))]
    told(stream, 1, 12)
    assert read(stream) == [(1, (12,))]


def test_an_output_that_is_read_in_parts_keeps_its_place() -> None:
    stream = opened(2)
    told(stream, 0, 5)
    assert stream.poll() == Delta(0, 0, (5,), "")
    told(stream, 0, 6)
    told(stream, 1, 7)
    assert read(stream) == [(0, (6,)), (1, (7,))]


def test_what_is_discarded_is_not_read() -> None:
    stream = opened(2)
    told(stream, 0, 5)
    stream.discard(SlowConsumer("too slow"))
    told(stream, 1, 6)
    with pytest.raises(SlowConsumer):
        stream.poll()
    assert not any(output.in_line or output.ids for output in stream.outputs)
