"""Classify as clients see it: labels and their scores, what a model without labels says, and every refusal by field."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio
import numpy as np
import pytest
from google.protobuf.duration_pb2 import Duration

from core.errors import EngineDead, InvalidRequest
from core.types.io import Pooling, TextPair
from core.types.labels import Activation, Labels
from service.client import CallFailed, Classification, LabelScore
from service.pb.slipstream.v1 import inference_pb2 as pb
from service.wire.judge import classify_request
from service.wire.message_limits import MAX_EMBED_IDS, MAX_EMBED_INPUTS, MAX_LABEL_BYTES
from tests.support.fakes.fake_engine import FakeEngine, held, info_with
from tests.support.fakes.granted import granted
from tests.support.servers import Serve

METHOD = 'method="slipstream.v1.InferenceService/Classify"'
LABELS = Labels(("bad", "fine", "good"), Activation.SOFTMAX)


def judge(labels: Labels | None = LABELS, **facts: Any) -> FakeEngine:
    """An engine whose model says length and place of an input, and 1, as its numbers."""
    return FakeEngine(info=info_with(labels=labels, **facts))


def text(value: str) -> pb.ClassifyInput:
    return pb.ClassifyInput(text=value)


def ids(values: list[int]) -> pb.ClassifyInput:
    return pb.ClassifyInput(token_ids=pb.TokenIds(ids=values))


def pair(first: str, second: str) -> pb.ClassifyInput:
    return pb.ClassifyInput(pair=pb.TextPair(first=first, second=second))


async def test_scores_come_by_label_in_the_order_of_the_inputs(serve: Serve) -> None:
    async with serve(judge()) as serving:
        found = await serving.client.classify("abc", [5, 6], ("ab", "cde"))
        response = await serving.stub.Classify(pb.ClassifyRequest(inputs=[text("ab")], request_id="mine"))
        (asked, _) = serving.engine.embedded
        assert await serving.metric(f'slipstream_rpc_handled_total{{code="OK",{METHOD}}}') == 2
    assert asked.inputs == ("abc", (5, 6), TextPair("ab", "cde")) and asked.pooling is Pooling.LABELS
    assert [each.prompt_tokens for each in found] == [3, 2, 5]
    for each, numbers in zip(found, ([3, 0, 1], [2, 1, 1], [5, 2, 1]), strict=True):
        assert tuple(score.label for score in each.scores) == LABELS.names
        want = np.exp(numbers) / np.exp(numbers).sum()
        np.testing.assert_allclose([score.score for score in each.scores], want, rtol=1e-6)
    assert found[0].best.label == "bad"
    assert (response.request_id, response.results[0].usage.completion_tokens) == ("mine", 0)


@pytest.mark.parametrize(
    ("activation", "scores"),
    [(Activation.SIGMOID, (1 / (1 + np.exp(-2)), 0.5)), (Activation.NONE, (2.0, 0.0))],
)
async def test_numbers_become_scores_as_the_model_says_unless_they_are_wanted_raw(
    serve: Serve, activation: Activation, scores: tuple[float, ...]
) -> None:
    async with serve(judge(Labels(("a", "b"), activation))) as serving:
        (scored,) = await serving.client.classify("ab")
        raw = await serving.client.classify("ab", raw_scores=True)
    np.testing.assert_allclose([each.score for each in scored.scores], scores, rtol=1e-6)
    assert raw == [Classification((LabelScore("a", 2.0), LabelScore("b", 0.0)), 2, 1)]


async def test_fields_reach_the_engine(serve: Serve) -> None:
    fields: dict[str, Any] = {"request_id": "r", "priority": -3, "cache_salt": "s", "adapter": "b"}
    async with serve(judge()) as serving:
        await serving.client.classify("a", timeout=5, queue_timeout=Duration(seconds=1, nanos=500_000_000), **fields)
        await serving.client.classify("a")
        full, plain = serving.engine.embedded
    assert {name: getattr(full, name) for name in fields} == fields
    assert (full.queue_timeout, full.deadline is not None, full.dimensions) == (1.5, True, None)
    assert (plain.queue_timeout, plain.cache_salt, plain.adapter, len(plain.request_id)) == (None, "", "", 32)


NO_WAIT = Duration(seconds=-1)

BAD: dict[str, tuple[dict[str, Any], list[str]]] = {
    "no inputs": ({}, ["inputs"]),
    "an input of nothing": ({"inputs": [text("a"), pb.ClassifyInput()]}, ["inputs[1].input"]),
    "an empty text": ({"inputs": [text("a"), text("")]}, ["inputs[1].text"]),
    "no ids": ({"inputs": [ids([])]}, ["inputs[0].token_ids.ids"]),
    "a pair without a first": ({"inputs": [text("a"), text("a"), pair("", "b")]}, ["inputs[2].pair.first"]),
    "a pair without a second": ({"inputs": [pair("a", "")]}, ["inputs[0].pair.second"]),
    "a pair of nothing": ({"inputs": [pair("", "")]}, ["inputs[0].pair.first", "inputs[0].pair.second"]),
    "too many inputs": ({"inputs": [text("a")] * (MAX_EMBED_INPUTS + 1)}, ["inputs"]),
    "too many ids in one": ({"inputs": [text("a"), ids([5] * 4096)]}, ["inputs[1].token_ids.ids"]),
    "too many ids in all": ({"inputs": [ids([5] * 4095)] * (MAX_EMBED_IDS // 4095 + 1)}, ["inputs"]),
    "an id with a space": ({"inputs": [text("a")], "request_id": "a b"}, ["request_id"]),
    "a long salt": ({"inputs": [text("a")], "cache_salt": "x" * 257}, ["cache_salt"]),
    "an adapter of no name": ({"inputs": [text("a")], "adapter": "no name"}, ["adapter"]),
    "a negative wait": ({"inputs": [text("a")], "queue_timeout": NO_WAIT}, ["queue_timeout"]),
    "everything": (
        {"request_id": "?", "inputs": [pb.ClassifyInput(), pair("", "b")], "queue_timeout": NO_WAIT},
        ["request_id", "inputs[0].input", "inputs[1].pair.first", "queue_timeout"],
    ),
}


@pytest.mark.parametrize("case", BAD)
async def test_bad_requests_never_reach_the_engine(serve: Serve, case: str) -> None:
    fields, named = BAD[case]
    async with serve(judge()) as serving:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await serving.stub.Classify(pb.ClassifyRequest(**fields))
        assert serving.engine.embedded == []
        assert await serving.metric('slipstream_requests_rejected_total{reason="INVALID_REQUEST"}') == 1
    error = CallFailed(failed.value)
    assert (error.code.name, sorted(error.fields)) == ("INVALID_ARGUMENT", sorted(named))


def test_a_call_is_bounded_by_the_queue_and_by_what_a_response_holds() -> None:
    message = pb.ClassifyRequest(inputs=[text("a")] * 100)
    few, many = info_with(labels=LABELS), info_with(labels=Labels(("x" * (MAX_LABEL_BYTES // 99),), Activation.NONE))
    assert len(classify_request(message, few, 100, None).inputs) == 100
    for info, queued in ((few, 99), (many, 1000)):
        with pytest.raises(InvalidRequest) as refused:
            classify_request(message, info, queued, None)
        assert [each.field for each in refused.value.violations] == ["inputs"]
    assert "at most 98 with 1 labels" in refused.value.message
    del message.inputs[98:]
    assert len(classify_request(message, many, 1000, None).inputs) == 98


async def test_the_largest_response_is_taken_by_a_client_with_default_limits(serve: Serve) -> None:
    names = tuple(f"{number:04}" for number in range(MAX_LABEL_BYTES // MAX_EMBED_INPUTS // 13))
    async with serve(judge(Labels(names, Activation.SOFTMAX))) as serving:
        found = await serving.client.classify(*["ab"] * MAX_EMBED_INPUTS, request_id="x" * 128)
        with pytest.raises(CallFailed) as failed:
            longer = judge(Labels((*names, "a", "b", "c", "d"), Activation.SOFTMAX)).model_info
            serving.engine.model_info = longer
            await serving.client.classify(*["ab"] * MAX_EMBED_INPUTS)
    assert sum(len(each.scores) for each in found) == len(names) * MAX_EMBED_INPUTS
    assert list(failed.value.fields) == ["inputs"]


@pytest.mark.parametrize(
    ("facts", "told"),
    [
        ({}, "use Generate or Embed"),
        ({"embedding_dimension": 0}, "use Generate"),
        ({"generates": False}, "use Embed"),
        ({"generates": False, "embedding_dimension": 0}, "it can be asked for tokens only"),
    ],
)
async def test_a_model_without_labels_says_what_it_has(serve: Serve, facts: dict[str, Any], told: str) -> None:
    async with serve(judge(None, **facts)) as serving:
        with pytest.raises(CallFailed) as failed:
            await serving.client.classify("a")
        assert serving.engine.embedded == []
        assert await serving.metric('slipstream_requests_rejected_total{reason="UNSUPPORTED"}') == 1
    assert (failed.value.code.name, failed.value.reason) == ("UNIMPLEMENTED", "UNSUPPORTED")
    assert failed.value.message == f"the served model has no labels to judge by; {told}"


async def test_a_model_that_only_judges_refuses_to_generate(serve: Serve) -> None:
    """Also where the request would be refused for something else, such as a chat template, or be kept."""
    labels = Labels(("relevant",), Activation.SIGMOID, relevance=0)
    async with serve(judge(labels, generates=False, has_chat_template=False), resume_seconds=10) as serving:
        for prompt, fields in (("hi", {}), ([{"role": "user", "content": "hi"}], {}), ("hi", {"resumable": True})):
            with pytest.raises(CallFailed) as failed:
                await serving.client.complete(prompt, **fields)
            assert (failed.value.code.name, failed.value.reason) == ("UNIMPLEMENTED", "UNSUPPORTED")
            assert failed.value.message == "the served model puts out no text; use Embed or Classify or Score"
        assert serving.engine.streams == []


async def test_labels_are_facts_of_the_model(serve: Serve) -> None:
    for activation in Activation:
        labels = Labels(("no", "yes"), activation, relevance=0 if activation is Activation.SIGMOID else None)
        async with serve(judge(labels, generates=False)) as serving:
            info = await serving.client.model_info()
        assert (list(info.labels), info.no_generation) == (["no", "yes"], True)
        assert pb.Activation.Name(info.activation) == f"ACTIVATION_{activation.value.upper()}"
        assert info.HasField("relevance_label") == (activation is Activation.SIGMOID)
    async with serve() as serving:
        info = await serving.client.model_info()
    assert (list(info.labels), info.activation, info.no_generation) == ([], pb.ACTIVATION_UNSPECIFIED, False)
    assert not info.HasField("relevance_label")


async def test_it_ends_as_embed_does(serve: Serve) -> None:
    async with serve(FakeEngine(held(asyncio.Event(), after=0), info_with(labels=LABELS))) as serving:
        call = asyncio.create_task(serving.client.classify("hi", request_id="mine"))
        await serving.engine.stream_number(1)
        assert await serving.client.abort("mine")
        with pytest.raises(CallFailed) as aborted:
            await call
        late = serving.stub.Classify(pb.ClassifyRequest(inputs=[text("hi")]))
        await serving.engine.stream_number(2)
        serving.engine.kill(RuntimeError("a step failed"))
        with pytest.raises(grpc.aio.AioRpcError) as died:
            await late
        assert serving.engine.live_requests == 0
    assert (aborted.value.code.name, aborted.value.reason) == ("CANCELLED", "REQUEST_ABORTED")
    assert CallFailed(died.value).reason == EngineDead.reason
    assert dict(died.value.trailing_metadata() or ()).get("grpc-retry-pushback-ms") == "-1"


@pytest.mark.parametrize("given", [("a", "b", "c"), ["a", "b"], ["a"]])
async def test_what_is_no_input_is_refused_where_the_call_was_made(given: Any, serve: Serve) -> None:
    """Two texts in a list are more likely a list of texts than a pair."""
    async with serve(judge()) as serving:
        with pytest.raises(TypeError, match="a pair is a tuple of two texts"):
            await serving.client.classify(given)
        assert serving.engine.embedded == []


async def test_ids_that_may_be_cut_are_not_too_many(serve: Serve) -> None:
    longest = info_with().max_input_length
    async with serve(judge()) as serving:
        with granted("ids that are cut"):
            long = [5] * (longest + 7)
        asked = [serving.client.classify(long, truncate=cut) for cut in (True, False)]
        cut, whole = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(whole, CallFailed) and not isinstance(cut, BaseException), cut
    assert [each.truncate for each in serving.engine.embedded] == [True]
