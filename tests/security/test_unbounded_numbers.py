"""Numbers, lists and strings without a bound: each is refused by name, quickly, and its neighbours notice nothing."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from service.client import CallFailed, SlipstreamClient
from service.pb.slipstream.v1 import inference_pb2 as pb
from tests.security import replies
from tests.security.edges import Edge, all_edges
from tests.security.judge_edges import LABEL_TOKENS
from tests.security.neighbour import beside
from tests.support.scorecard import Scorecard
from tests.support.servers import serve_checkpoint

shared_loop = pytest.mark.asyncio(loop_scope="module")

EVENTS = 4
"""Enough to see a refusal or an output; then the call is cancelled."""


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def client(tiny: Path) -> AsyncIterator[SlipstreamClient]:
    async with serve_checkpoint(tiny, grammar_callers="*", label_tokens=LABEL_TOKENS) as (_, made):
        yield made


async def outcome(client: SlipstreamClient, method: str, message: Any) -> CallFailed | None:
    """The failure of a call, None if it was served."""
    try:
        call = getattr(client.stub, method)(message)
        if method not in ("Generate", "Attach"):
            await call
            return None
        stream = call
        try:
            for _ in range(EVENTS):
                if await stream.read() is grpc.aio.EOF:
                    break
        finally:
            stream.cancel()
    except grpc.aio.AioRpcError as error:
        return replies.read(error)
    return None


@pytest.mark.alone
@shared_loop
async def test_the_table_of_edges(client: SlipstreamClient, scorecard: Scorecard) -> None:
    edges = all_edges()
    wrong: list[str] = []
    refusals: list[float] = []
    async with beside(client) as neighbour:
        for edge in edges:
            before = time.monotonic()
            try:
                failed = await outcome(client, edge.method, edge.message)
            except AssertionError as error:
                wrong.append(f"{edge.method} {edge.name}: {error}")
                continue
            seconds = time.monotonic() - before
            wrong += faults(edge, failed)
            if failed is not None:
                refusals.append(seconds)
    print(f"{len(edges)} edges, {neighbour.answers} answers beside them, loop late by {neighbour.worst_lag:.3f} s")
    assert not wrong, "\n".join(wrong)
    scorecard(28, "edges", len(edges), at_least=400)
    scorecard(28, "edges answered by another code, or naming another field", len(wrong), equals=0)
    scorecard(28, "median ms of a refusal", statistics.median(refusals) * 1e3, at_most=50)
    scorecard(28, "slowest refusal, ms", max(refusals) * 1e3)


def faults(edge: Edge, failed: CallFailed | None) -> list[str]:
    """What is wrong with this outcome."""
    where = f"{edge.method} {edge.name}"
    if edge.absent:
        fine = failed is not None and failed.code is grpc.StatusCode.NOT_FOUND
        return [] if fine else [f"{where}: {failed}, expected NOT_FOUND"]
    if failed is None:
        return [] if edge.refused is None else [f"{where}: served, but {edge.refused} is out of range"]
    if edge.refused is None:
        return [f"{where}: refused with {failed} {failed.fields}"]
    if failed.code is not grpc.StatusCode.INVALID_ARGUMENT or edge.refused not in failed.fields:
        return [f"{where}: {failed.code.name} names {sorted(failed.fields)}, expected {edge.refused}"]
    return []


def test_the_table_covers_every_field() -> None:
    """A new field without edges fails here."""
    covered: dict[str, set[str]] = {}
    for edge in all_edges():
        collect(edge.message, covered)
    both = ("GenerateRequest", "SamplingParams", "OutputOptions", "TokenizeRequest", "DetokenizeRequest")
    judged = ("ClassifyRequest", "ClassifyInput", "TextPair", "ScoreRequest")
    spoken = ("Chat", "ChatMessage", "ContentPart", "Image", "Audio", "ToolCall", "ToolChoice")
    others = ("EmbedRequest", "EmbedInput", "Constraint", "Choice", "AttachRequest", "AttachPosition")
    tagged = ("StructuralTags", "StructuralTag")
    for name in (*both, *judged, *spoken, *others, *tagged):
        fields = {field.name for field in pb.DESCRIPTOR.message_types_by_name[name].fields}
        assert covered[name] == fields, name


def collect(message: Any, covered: dict[str, set[str]]) -> None:
    """Note the fields that are set in `message` and below."""
    for field, value in message.ListFields():
        covered.setdefault(message.DESCRIPTOR.name, set()).add(field.name)
        if field.message_type is not None and not field.is_repeated:
            collect(value, covered)
        elif field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for each in value[:MEMBERS]:
                collect(each, covered)


MEMBERS = 2
"""Of a repeated field that `collect` looks into."""

MEGA = 1_000_000

FLOODS: dict[str, tuple[Callable[[], Any], str]] = {
    "stop strings": (lambda: sampled(stop=["ab"] * MEGA), "sampling_params.stop"),
    "empty stop strings": (lambda: sampled(stop=[""] * 2 * MEGA), "sampling_params.stop"),
    "stop ids": (lambda: sampled(stop_token_ids=[5] * 4 * MEGA), "sampling_params.stop_token_ids"),
    "ids to be told of": (
        lambda: sampled(logprobs=True, logprob_token_ids=[5] * 4 * MEGA),
        "sampling_params.logprob_token_ids",
    ),
    "biases": (lambda: sampled(logit_bias=dict.fromkeys(range(240000), 1.0)), "sampling_params.logit_bias"),
    "ids": (lambda: pb.GenerateRequest(token_ids={"ids": [5] * 4 * MEGA}), "token_ids.ids"),
    "wide ids": (lambda: pb.GenerateRequest(token_ids={"ids": [-1] * 400_000}), "token_ids.ids"),
    "turns": (lambda: turns([pb.ChatMessage(role="u", content="a")] * 500_000), "chat.messages"),
    "empty turns": (lambda: turns([pb.ChatMessage()] * 2 * MEGA), "chat.messages"),
    "tool calls": (
        lambda: turns([pb.ChatMessage(role="u", tool_calls=[pb.ToolCall(name="a")] * 500_000)]),
        "chat.messages",
    ),
    "tools": (lambda: pb.GenerateRequest(chat=pb.Chat(tools=["{}"] * 500_000)), "chat.tools"),
    "text": (lambda: pb.GenerateRequest(text="a" * 4 * MEGA), "text"),
    "turn": (lambda: turns([pb.ChatMessage(role="u", content="a" * 4 * MEGA)]), "chat.messages"),
    "empty inputs": (lambda: pb.EmbedRequest(inputs=[pb.EmbedInput()] * 2 * MEGA), "inputs"),
    "inputs of many ids": (lambda: embedded([5] * 30_000), "inputs[0].token_ids.ids"),
    "many inputs of ids": (lambda: embedded([5] * 1_023, 2_000), "inputs"),
    "empty inputs to judge": (lambda: pb.ClassifyRequest(inputs=[pb.ClassifyInput()] * 2 * MEGA), "inputs"),
    "empty documents": (lambda: pb.ScoreRequest(query="q", documents=[""] * 2 * MEGA), "documents"),
    "query": (lambda: pb.ScoreRequest(query="q" * 3 * MEGA, documents=["a"] * 128), "query"),
    "query in front of many": (lambda: pb.ScoreRequest(query="q" * 65_000, documents=["a"] * 128), "documents"),
}


def embedded(ids: list[int], count: int = 128) -> pb.EmbedRequest:
    """`count` inputs of the same ids."""
    return pb.EmbedRequest(inputs=[pb.EmbedInput(token_ids=pb.TokenIds(ids=ids))] * count)


def sampled(**params: Any) -> pb.GenerateRequest:
    """A one-letter prompt with these sampling parameters."""
    return pb.GenerateRequest(text="a", sampling_params=pb.SamplingParams(**params))


def turns(messages: list[pb.ChatMessage]) -> pb.GenerateRequest:
    """A conversation."""
    return pb.GenerateRequest(chat=pb.Chat(messages=messages))


@pytest.mark.alone
@shared_loop
@pytest.mark.parametrize("name", FLOODS)
async def test_floods_within_one_message(client: SlipstreamClient, name: str, scorecard: Scorecard) -> None:
    make, field = FLOODS[name]
    message = make()
    async with beside(client) as neighbour:
        before = time.monotonic()
        failed = await outcome(client, type(message).__name__.removesuffix("Request"), message)
        seconds = time.monotonic() - before
    assert failed is not None and failed.code is grpc.StatusCode.INVALID_ARGUMENT, failed
    assert field in failed.fields
    scorecard(28, f"megabytes of {name}: ms to the refusal", seconds * 1e3, at_most=1000)
    scorecard(28, f"megabytes of {name}: loop late by, ms", neighbour.worst_lag * 1e3)


@shared_loop
async def test_metadata_within_the_limit_is_always_taken_and_past_it_never(client: SlipstreamClient) -> None:
    """Names, values and 32 bytes for each count, those of gRPC itself too."""

    async def told(size: int) -> str:
        try:
            await client.stub.Tokenize(pb.TokenizeRequest(text="a"), metadata=(("x-filler", "a" * size),))
        except grpc.aio.AioRpcError as refused:
            return refused.code().name
        return "OK"

    for kib, outcome_ in ((4.5, "OK"), (6, "OK"), (7, "OK"), (8, "RESOURCE_EXHAUSTED"), (16, "RESOURCE_EXHAUSTED")):
        assert set(await asyncio.gather(*(told(int(kib * 1024)) for _ in range(20)))) == {outcome_}, kib


@shared_loop
async def test_a_message_past_the_limit(client: SlipstreamClient) -> None:
    limit = (await client.stub.GetServerInfo(pb.GetServerInfoRequest())).max_receive_bytes
    overhead = pb.TokenizeRequest(text="a" * limit).ByteSize() - limit
    fits = pb.TokenizeRequest(text="a" * (limit - overhead))
    assert fits.ByteSize() == limit
    failed = await outcome(client, "Tokenize", fits)
    assert failed is not None and list(failed.fields) == ["text"]
    over = pb.TokenizeRequest(text="a" * (limit - overhead + 1))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await client.stub.Tokenize(over)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
