"""Translates Classify and Score between the wire and the engine, which takes both as an `EmbedRequest` for labels."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from core.errors import FieldViolation, InvalidRequest
from core.types.io import Embedding, EmbedRequest, EmbedResult, ModelInfo, Pooling, TextPair
from core.types.labels import Labels
from service.pb.slipstream.v1 import inference_pb2 as pb
from service.tenant_ids import public_id
from service.wire.embed import given, input_violations, shared_fields
from service.wire.generate import id_violations, queue_timeout_violations
from service.wire.message_limits import refuse_oversized_classify, refuse_oversized_score
from service.wire.packed import label_scores
from service.wire.served_calls import labels_of, relevance_of

_INPUTS = re.compile(r"inputs(?:(\[\d+\])\.pair)?")
_QUERY = re.compile(r"inputs\[\d+\]\.pair\.first")


def classify_request(
    message: pb.ClassifyRequest, info: ModelInfo, max_queued: int, deadline: float | None
) -> EmbedRequest:
    """The request as the engine takes it, otherwise as `embed_request`. Raises Unsupported and InvalidRequest."""
    refuse_oversized_classify(message, info, labels_of(info), max_queued)
    violations = [
        *id_violations(message),
        *input_violations(message.inputs, "text, token_ids or pair"),
        *_pair_violations(message),
        *queue_timeout_violations(message),
    ]
    if violations:
        raise InvalidRequest(violations)
    return EmbedRequest(given(message.inputs), pooling=Pooling.LABELS, **shared_fields(message, deadline))


def _pair_violations(message: pb.ClassifyRequest) -> Iterator[FieldViolation]:
    for index, each in enumerate(message.inputs):
        if each.WhichOneof("input") == "pair":
            for name in ("first", "second"):
                if not getattr(each.pair, name):
                    yield FieldViolation(f"inputs[{index}].pair.{name}", "must not be empty")


def score_request(message: pb.ScoreRequest, info: ModelInfo, max_queued: int, deadline: float | None) -> EmbedRequest:
    """The request as the engine takes it: a pair for each document. Raises Unsupported and InvalidRequest.

    The engine names its inputs in what it refuses: `of_documents` has the names of the message.
    """
    relevance_of(info)
    refuse_oversized_score(message, info, max_queued)
    violations = [*id_violations(message), *_score_violations(message), *queue_timeout_violations(message)]
    if violations:
        raise InvalidRequest(violations)
    query = message.query
    pairs = tuple(TextPair(query, document) for document in message.documents)
    return EmbedRequest(pairs, pooling=Pooling.LABELS, **shared_fields(message, deadline))


def _score_violations(message: pb.ScoreRequest) -> Iterator[FieldViolation]:
    if not message.query:
        yield FieldViolation("query", "must not be empty")
    if not message.documents:
        yield FieldViolation("documents", "must not be empty")
    for index, document in enumerate(message.documents):
        if not document:
            yield FieldViolation(f"documents[{index}]", "must not be empty")
    if message.HasField("top_n") and message.top_n < 1:
        yield FieldViolation("top_n", "must be at least 1")


def of_documents(error: InvalidRequest) -> InvalidRequest:
    """`error` of the engine with the names that the fields have in a ScoreRequest."""
    found = [FieldViolation(_name_of(each.field), each.description) for each in error.violations]
    # What is wrong with the query is wrong with all pairs that it is in.
    return InvalidRequest(list(dict.fromkeys(found)))


def _name_of(field: str) -> str:
    return "query" if _QUERY.fullmatch(field) else _INPUTS.sub(r"documents\1", field)


def classify_response(result: EmbedResult, message: pb.ClassifyRequest, labels: Labels) -> pb.ClassifyResponse:
    """The response with the scores of all inputs."""
    return pb.ClassifyResponse(
        request_id=public_id(result.request_id),
        results=[_classification(each, labels, message.raw_scores) for each in result.embeddings],
    )


def _classification(each: Embedding, labels: Labels, raw: bool) -> pb.Classification:
    message = pb.Classification.FromString(label_scores(labels.names, _scores(each, labels, raw)))
    message.usage.CopyFrom(_usage(each))
    return message


def score_response(result: EmbedResult, message: pb.ScoreRequest, labels: Labels) -> pb.ScoreResponse:
    """The response with the scores of the documents, or of the best of them."""
    assert labels.relevance is not None, "score_request() refuses models without it"
    scores = [float(_scores(each, labels, message.raw_scores)[labels.relevance]) for each in result.embeddings]
    order = list(range(len(scores)))
    if message.HasField("top_n"):
        # The sort is stable, so equal ones stay in the order of the documents.
        order = sorted(order, key=lambda index: -scores[index])[: message.top_n]
    return pb.ScoreResponse(
        request_id=public_id(result.request_id),
        results=[
            pb.DocumentScore(index=index, score=scores[index], usage=_usage(result.embeddings[index]))
            for index in order
        ],
    )


def _scores(each: Embedding, labels: Labels, raw: bool) -> npt.NDArray[np.float32]:
    return each.values if raw else labels.activation(each.values)


def _usage(each: Embedding) -> pb.Usage:
    return pb.Usage(prompt_tokens=each.prompt_tokens, cached_tokens=each.cached_tokens)
