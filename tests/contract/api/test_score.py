"""Score as clients see it: documents by their relevance to a query, in their order or best first; refusals by field."""

from __future__ import annotations

from typing import Any

import grpc.aio
import numpy as np
import pytest
from google.protobuf.duration_pb2 import Duration

from core.errors import FieldViolation, InvalidRequest
from core.types.io import Pooling, TextPair
from core.types.labels import Activation, Labels
from service.client import CallFailed, DocumentScore
from service.pb.slipstream.v1 import inference_pb2 as pb
from service.wire.judge import score_request
from service.wire.message_limits import MAX_EMBED_INPUTS, MAX_SCORE_CHARS
from tests.contract.api.test_classify import LABELS, NO_WAIT, judge
from tests.support.fakes.fake_engine import info_with
from tests.support.servers import Serve

METHOD = 'method="slipstream.v1.InferenceService/Score"'
RELEVANCE = Labels(("relevant",), Activation.SIGMOID, relevance=0)
ANSWERS = Labels(("no", "yes"), Activation.SOFTMAX, relevance=1)
QUERY = "q"
DOCUMENTS = ("ab", "abcd", "a", "dcba")
LENGTHS = [3, 5, 2, 5]
"""With the query; the fake engine's first number of a pair."""


async def test_documents_are_scored_in_their_order(serve: Serve) -> None:
    async with serve(judge(RELEVANCE)) as serving:
        found = await serving.client.score(QUERY, DOCUMENTS)
        raw = await serving.client.score(QUERY, DOCUMENTS, raw_scores=True)
        asked = serving.engine.embedded[0]
        response = await serving.stub.Score(pb.ScoreRequest(query="q", documents=["d"], request_id="mine"))
        assert await serving.metric(f'slipstream_rpc_handled_total{{code="OK",{METHOD}}}') == 3
    assert asked.inputs == tuple(TextPair(QUERY, document) for document in DOCUMENTS)
    assert asked.pooling is Pooling.LABELS
    assert raw == [DocumentScore(place, length, length, 1) for place, length in enumerate(LENGTHS)]
    np.testing.assert_allclose([each.score for each in found], 1 / (1 + np.exp(-np.array(LENGTHS))), rtol=1e-6)
    assert [each.index for each in found] == [0, 1, 2, 3]
    assert (response.request_id, response.results[0].usage.completion_tokens) == ("mine", 0)


@pytest.mark.parametrize(("top_n", "order"), [(1, [1]), (3, [1, 3, 0]), (4, [1, 3, 0, 2]), (100, [1, 3, 0, 2])])
async def test_the_best_come_first_and_equal_ones_in_their_order(serve: Serve, top_n: int, order: list[int]) -> None:
    async with serve(judge(RELEVANCE)) as serving:
        found = await serving.client.score(QUERY, DOCUMENTS, top_n=top_n)
    assert [each.index for each in found] == order
    assert [each.prompt_tokens for each in found] == [LENGTHS[index] for index in order]


async def test_the_score_is_that_of_the_label_that_says_relevance(serve: Serve) -> None:
    """The fake engine's number for it is the place of the document; that of the other label is the length."""
    async with serve(judge(ANSWERS)) as serving:
        raw = await serving.client.score(QUERY, DOCUMENTS, raw_scores=True)
        scores = await serving.client.score(QUERY, DOCUMENTS)
    assert [each.score for each in raw] == [0, 1, 2, 3]
    want = [np.exp(place) / (np.exp(place) + np.exp(length)) for place, length in enumerate(LENGTHS)]
    np.testing.assert_allclose([each.score for each in scores], want, rtol=1e-6)


async def test_fields_reach_the_engine(serve: Serve) -> None:
    fields: dict[str, Any] = {"request_id": "r", "priority": -3, "cache_salt": "s", "adapter": "b"}
    async with serve(judge(RELEVANCE)) as serving:
        await serving.client.score("q", ["a"], timeout=5, queue_timeout=Duration(seconds=2), **fields)
        (full,) = serving.engine.embedded
    assert {name: getattr(full, name) for name in fields} == fields
    assert (full.queue_timeout, full.deadline is not None) == (2.0, True)


TWO = {"query": "q", "documents": ["a", "b"]}

BAD: dict[str, tuple[dict[str, Any], list[str]]] = {
    "nothing": ({}, ["documents", "query"]),
    "no query": ({"documents": ["a"]}, ["query"]),
    "no documents": ({"query": "q"}, ["documents"]),
    "an empty document": ({"query": "q", "documents": ["a", "b", "c", ""]}, ["documents[3]"]),
    "too many documents": ({"query": "q", "documents": ["a"] * (MAX_EMBED_INPUTS + 1)}, ["documents"]),
    "a query beyond any context": (TWO | {"query": "q" * (4095 * 64 + 1)}, ["query"]),
    "a long query in front of many": ({"query": "q" * 32_768, "documents": ["a"] * 128}, ["documents"]),
    "no best": (TWO | {"top_n": 0}, ["top_n"]),
    "a negative number of best": (TWO | {"top_n": -1}, ["top_n"]),
    "an id with a space": (TWO | {"request_id": "a b"}, ["request_id"]),
    "a long salt": (TWO | {"cache_salt": "x" * 257}, ["cache_salt"]),
    "an adapter of no name": (TWO | {"adapter": "no name"}, ["adapter"]),
    "a negative wait": (TWO | {"queue_timeout": NO_WAIT}, ["queue_timeout"]),
    "everything": (
        {"request_id": "?", "documents": [""], "top_n": 0, "queue_timeout": NO_WAIT},
        ["request_id", "query", "documents[0]", "top_n", "queue_timeout"],
    ),
}


@pytest.mark.parametrize("case", BAD)
async def test_bad_requests_never_reach_the_engine(serve: Serve, case: str) -> None:
    fields, named = BAD[case]
    async with serve(judge(RELEVANCE)) as serving:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await serving.stub.Score(pb.ScoreRequest(**fields))
        assert serving.engine.embedded == []
        assert await serving.metric('slipstream_requests_rejected_total{reason="INVALID_REQUEST"}') == 1
    error = CallFailed(failed.value)
    assert (error.code.name, sorted(error.fields)) == ("INVALID_ARGUMENT", sorted(named))


def test_a_call_is_bounded_by_the_queue_and_by_all_that_is_tokenised() -> None:
    info = info_with(labels=RELEVANCE, max_input_length=1_000_000)
    message = pb.ScoreRequest(query="q" * (MAX_SCORE_CHARS // 2 - 10), documents=["d" * 10, "d" * 10])
    assert len(score_request(message, info, 2, None).inputs) == 2
    message.documents[1] += "d"
    with pytest.raises(InvalidRequest) as refused:
        score_request(message, info, 2, None)
    assert refused.value.message == (
        f"documents: with the query in front of each have {MAX_SCORE_CHARS + 1} characters, "
        f"at most {MAX_SCORE_CHARS} fit one call"
    )
    with pytest.raises(InvalidRequest, match="documents: has 3 documents, at most 2"):
        score_request(pb.ScoreRequest(query="q", documents=["d"] * 3), info, 2, None)


async def test_what_the_engine_refuses_is_told_by_the_names_of_the_message(serve: Serve) -> None:
    async with serve(judge(RELEVANCE)) as serving:
        fields = ("inputs[0].pair", "inputs[12].pair", "inputs", "adapter")
        serving.engine.refuse_with = InvalidRequest([FieldViolation(field, "no") for field in fields])
        with pytest.raises(CallFailed) as failed:
            await serving.client.score("q", ["a"])
        serving.engine.refuse_with = InvalidRequest.of("inputs[2].pair", "no")
        with pytest.raises(CallFailed) as judged:
            await serving.client.classify(("a", "b"))
    assert list(failed.value.fields) == ["documents[0]", "documents[12]", "documents", "adapter"]
    assert list(judged.value.fields) == ["inputs[2].pair"]


@pytest.mark.parametrize(
    ("labels", "told"),
    [
        (LABELS, "the served model has 3 labels and none says relevance; use Classify for their scores"),
        (None, "the served model has no labels to judge by; use Generate or Embed"),
    ],
)
async def test_a_model_that_says_no_relevance_says_what_it_has(serve: Serve, labels: Labels | None, told: str) -> None:
    async with serve(judge(labels)) as serving:
        with pytest.raises(CallFailed) as failed:
            await serving.client.score("q", ["a"])
        assert serving.engine.embedded == []
    assert (failed.value.code.name, failed.value.reason, failed.value.message) == ("UNIMPLEMENTED", "UNSUPPORTED", told)


async def test_one_text_is_not_a_list_of_its_characters(serve: Serve) -> None:
    async with serve(judge(RELEVANCE)) as serving:
        with pytest.raises(TypeError, match="documents must be a list of texts"):
            await serving.client.score("q", "a document")
        assert serving.engine.embedded == []
