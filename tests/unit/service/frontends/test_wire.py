"""What passes between front end and engine comes out as it went in; what is left unread is merged and bounded."""

from __future__ import annotations

import asyncio
import math
import sys

import numpy as np
import pytest

from core.engine.streams.unread import UnreadBytes
from core.errors import (
    DeadlinePassed,
    FieldViolation,
    InvalidRequest,
    Overloaded,
    QueueTimeout,
    SlipstreamError,
    SlowConsumer,
)
from core.types.adapters import AdapterInfo, AdapterList
from core.types.audio import Audio, AudioTask
from core.types.chat import AnswerKind, AnswerPart, ChatMessage, ToolCall, ToolMode
from core.types.constraint import Constraint, ConstraintKind
from core.types.io import (
    Delta,
    Embedding,
    EmbedRequest,
    EmbedResult,
    Finished,
    FinishReason,
    GenerateRequest,
    Pooling,
    TextPair,
    Timing,
    TokenLogprob,
    Usage,
)
from core.types.labels import Activation, Labels
from core.types.plain import to_plain
from core.types.sampling_params import SamplingParams
from core.types.stats import DraftStats, EngineStats, HistogramStats, PoolStats
from service.frontends import wire
from service.frontends.events import EventBatch, read_events
from service.frontends.plain_json import (
    error_from_plain,
    error_to_plain,
    from_plain,
    vectors_from_plain,
    vectors_to_plain,
)
from service.frontends.remote_stream import RemoteStream
from service.frontends.wire import Kind, Link
from tests.support.fakes.fake_engine import INFO, info_with

PARTS = (
    AnswerPart(AnswerKind.REASONING, "hé"),
    AnswerPart(AnswerKind.CALL, call=ToolCall("look", '{"far": 3}', "c")),
)

VALUES = [
    GenerateRequest("a", token_ids=(1, 2), sampling=SamplingParams(logit_bias={3: -1.5}, stop=("x", "y"), seed=7)),
    GenerateRequest("d", "t", speculative=False),
    GenerateRequest("g", audio=Audio(b"RIFF\xff", "en", AudioTask.TRANSLATE)),
    GenerateRequest("e", "t", images=(b"\x00\xff", b"")),
    GenerateRequest("f", chat=(ChatMessage("user", "", parts=("a", b"\x89PNG", "")),), tool_mode=ToolMode.REQUIRED),
    GenerateRequest("c", "t", constraint=Constraint(ConstraintKind.REGEX, "a|b")),
    GenerateRequest("b", chat=(ChatMessage("user", "é\ud800"),), deadline=12.5, cache_salt="alice\0", adapter="x"),
    GenerateRequest(
        "e",
        chat=(ChatMessage("a", "b", (ToolCall("look", "{}", "c1"), ToolCall("x")), "c", "n", "r"),),
        chat_tools=("{}",),
        chat_arguments='{"a": 1}',
        special_tokens=True,
    ),
    EmbedRequest(("text", (1, 2)), pooling=Pooling.MEAN, dimensions=3),
    EmbedRequest(("a", TextPair("é", "d"), (1, 2)), pooling=Pooling.LABELS),
    info_with(labels=Labels(("bad", "fine"), Activation.SIGMOID, relevance=1), generates=False),
    Finished(1, FinishReason.STOP, Usage(1, 2, 3, 5, 4), Timing(0.5, math.inf, 2.0), "stop"),
    Delta(0, 3, (4,), "t", (TokenLogprob(4, -0.5, ((4, -0.5), (5, -1.0))),)),
    INFO,
    EngineStats(
        5,
        (PoolStats("req", 4, 1),),
        drafts=DraftStats(1, (0, 2), (1, 1), 3, 1, 0.5, 1.5),
        finished={"stop": 2},
        histograms={"x": HistogramStats((1.0,), (2,), 3.0)},
    ),
    AdapterList((AdapterInfo("a", 1, 2, 3, True, False, 4, None),), 5, 6),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_data_comes_out_as_it_went_in(value: object) -> None:
    import json

    assert from_plain(type(value), json.loads(json.dumps(to_plain(value)))) == value


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequest([FieldViolation("a", "b"), FieldViolation("c", "d")]),
        Overloaded("full", reason="QUEUE_FULL", retry_after=2.5),
        QueueTimeout("late"),
        DeadlinePassed("passed"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_keep_their_kind_reason_and_details(error: SlipstreamError) -> None:
    back = error_from_plain(error_to_plain(error))
    assert type(back) is type(error) and vars(back) == vars(error) and str(back) == str(error)


def test_an_error_of_our_own_making_stays_where_it_was_made() -> None:
    back = error_from_plain(error_to_plain(ValueError("/secret/path")))
    assert not isinstance(back, SlipstreamError) and "secret" not in str(back)


def test_vectors_are_exact() -> None:
    values = np.array([0.1, -2.5e-30, 3.0], np.float32)
    back = vectors_from_plain(vectors_to_plain(EmbedResult("r", (Embedding(values, 3, 1),))))
    assert back.request_id == "r" and back.embeddings[0].values.tolist() == values.tolist()
    assert (back.embeddings[0].prompt_tokens, back.embeddings[0].cached_tokens) == (3, 1)


def test_a_batch_of_events_survives_being_cut_anywhere() -> None:
    top = (TokenLogprob(4, -0.1, ((4, -0.1), (2**32 - 1, -math.inf))), TokenLogprob(5, math.nextafter(-1, 0)))
    told = (TokenLogprob(6, -2.0, (), (-0.5, -math.inf)), TokenLogprob(7, -2.0, ((7, -2.0),), (0.25, 0.125)))
    deltas = [
        (7, Delta(0, 5, (1, 2, 3), "héllo")),
        (9, Delta(1, 0, (), "x")),
        (7, Delta(0, 8, (4, 5), "\ud800", top)),
        (2**33, Delta(0, 2**20, (2**31,), "", top[1:])),
        (8, Delta(0, 1, (6, 7), "", told)),
        (7, Delta(0, 10, (4, 5), "", top)),
        (6, Delta(0, -(2**20), (4, 5), "", top)),
        (5, Delta(0, 1, (6, 7), "", told, PARTS)),
        (4, Delta(0, 2, (), "", (), PARTS[:1])),
    ]
    batch = EventBatch()
    for stream, delta in deltas:
        batch.add(stream, delta)
    batch.start(7, {})
    batch.end(9, "finished", None)
    got: list[tuple[Kind, bytes]] = []
    link = Link(lambda kind, _, body: got.append((kind, body)), lambda: None)
    for byte in batch.frame() * 2:
        link.data_received(bytes([byte]))
    assert [kind for kind, _ in got] == [Kind.EVENTS] * 2
    for _, body in got:
        before, between, after = read_events(body)
        assert (before, list(between), after) == ([[7, {}]], deltas, [[9, "finished", None]])


def test_a_batch_knows_how_large_it_is() -> None:
    """It is sent once it is large enough, and log probabilities are most of it."""
    top, chosen = tuple((token, -1.0) for token in range(64)), (-2.0,) * 1024
    for told in (TokenLogprob(4, -0.1), TokenLogprob(4, -0.1, top), TokenLogprob(4, -0.1, (), chosen)):
        batch = EventBatch()
        for place in range(40):
            batch.add(7, Delta(0, place, (4,), "some text", (told,)))
        assert batch.size == pytest.approx(len(batch.frame()), rel=0.05)


async def test_tokens_of_a_prompt_are_merged_by_themselves() -> None:
    stream = RemoteStream("r", 1, lambda: None, max_pending_tokens=2, room=UnreadBytes())
    told = (TokenLogprob(3, -1.0),)
    for position in (-3, -2, -1):
        stream.push(Delta(0, position, (position + 9,), "", told))
    stream.push(Delta(0, 0, (1,), "a"))
    stream.push(Delta(0, 1, (2,), "b"))
    assert await anext(stream) == Delta(0, -3, (6, 7, 8), "", told * 3)
    assert await anext(stream) == Delta(0, 0, (1, 2), "ab")
    stream.push(Delta(0, 2, (3,), "c"))
    assert await anext(stream) == Delta(0, 2, (3,), "c")


async def test_parts_of_an_answer_are_kept_in_order_until_they_are_read() -> None:
    room = UnreadBytes()
    stream = RemoteStream("r", 1, lambda: None, max_pending_tokens=200, room=room)
    for place in range(100):
        part = AnswerPart(AnswerKind.CONTENT, str(place))
        stream.push(Delta(0, place, (place,), parts=(part, PARTS[1])))
    assert room.bytes > 100 * sys.getsizeof(""), "they are counted"
    delta = await anext(stream)
    assert isinstance(delta, Delta) and delta.text == ""
    assert [part.text for part in delta.parts[::2]] == [str(place) for place in range(100)]
    assert set(delta.parts[1::2]) == {PARTS[1]} and room.bytes == 0


def test_a_delta_whose_parts_cannot_be_read_is_known_by_its_stream() -> None:
    batch = EventBatch()
    for stream in (3, 4):
        batch.add(stream, Delta(0, 1, (6,), parts=PARTS))
    body = batch.frame()[wire._HEADER.size :].replace(b"reasoning", b"unreasons", 1)
    _, between, _ = read_events(body)
    assert list(between) == [(3, None), (4, Delta(0, 1, (6,), parts=PARTS))]


async def test_unread_deltas_are_merged_and_bounded() -> None:
    ended: list[bool] = []
    stream = RemoteStream("r", 2, lambda: ended.append(True), max_pending_tokens=6, room=UnreadBytes())
    for index, position, text in ((0, 0, "a"), (1, 0, "b"), (0, 1, "c")):
        stream.push(Delta(index, position, (position,), text, (TokenLogprob(position, -1.0),)))
    assert await anext(stream) == Delta(0, 0, (0, 1), "ac", (TokenLogprob(0, -1.0), TokenLogprob(1, -1.0)))
    assert await anext(stream) == Delta(1, 0, (0,), "b", (TokenLogprob(0, -1.0),))
    for position in range(2, 9):
        stream.push(Delta(0, position, (position,)))
    assert ended == [True], "the engine is told once"
    assert (await anext(stream)).token_ids == tuple(range(2, 9))
    with pytest.raises(SlowConsumer):
        await anext(stream)
    with pytest.raises(StopAsyncIteration):
        await asyncio.wait_for(anext(stream), 1)
