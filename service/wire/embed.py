"""Translates Embed between the wire and the engine, as `service.wire.generate` does for generation.

`service.wire.judge` does so for the calls that judge their inputs.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from core.errors import FieldViolation, InvalidRequest
from core.types.io import Embedding, EmbedRequest, EmbedResult, Input, ModelInfo, Pooling, TextPair
from service.pb.slipstream.v1 import inference_pb2 as pb
from service.tenant_ids import public_id
from service.wire.generate import id_violations, queue_timeout_violations, seconds
from service.wire.message_limits import refuse_oversized_embed
from service.wire.packed import LENGTH, tag, varint
from service.wire.served_calls import refuse_unless_embedding

Fields = dict[str, Any]

POOLINGS = {
    pb.POOLING_LAST: Pooling.LAST,
    pb.POOLING_MEAN: Pooling.MEAN,
    pb.POOLING_CLS: Pooling.CLS,
}

_VALUES_TAG = tag(pb.Embedding.VALUES_FIELD_NUMBER, LENGTH)


def embed_request(message: pb.EmbedRequest, info: ModelInfo, max_queued: int, deadline: float | None) -> EmbedRequest:
    """The request as the engine takes it. It gets a random id if the client gave none.

    `deadline` is a `time.monotonic()` instant. More inputs than `max_queued` are refused: they could never be queued.
    Raises Unsupported, and InvalidRequest, which names every bad field at once.
    """
    refuse_unless_embedding(info)
    refuse_oversized_embed(message, info, max_queued)
    violations = [*id_violations(message), *input_violations(message.inputs), *queue_timeout_violations(message)]
    pooling = info.pooling if message.pooling == pb.POOLING_UNSPECIFIED else POOLINGS.get(message.pooling)
    if pooling is None:
        violations.append(FieldViolation("pooling", "is not a pooling that this server knows"))
    if violations or pooling is None:
        raise InvalidRequest(violations)
    return EmbedRequest(
        inputs=given(message.inputs),
        pooling=pooling,
        normalize=message.normalize if message.HasField("normalize") else True,
        dimensions=message.dimensions if message.HasField("dimensions") else None,
        **shared_fields(message, deadline),
    )


def shared_fields(message: pb.EmbedRequest | pb.ClassifyRequest | pb.ScoreRequest, deadline: float | None) -> Fields:
    """The fields of an EmbedRequest that all messages have whose inputs are prefilled only."""
    return {
        "request_id": message.request_id or uuid.uuid4().hex,
        "priority": message.priority,
        "queue_timeout": seconds(message.queue_timeout) if message.HasField("queue_timeout") else None,
        "deadline": deadline,
        "cache_salt": message.cache_salt,
        "adapter": message.adapter,
        "truncate": message.truncate,
    }


def input_violations(
    inputs: Sequence[pb.EmbedInput | pb.ClassifyInput], forms: str = "text or token_ids"
) -> Iterator[FieldViolation]:
    """The violations of inputs that are none or empty; `forms` names the members of their oneof."""
    if not inputs:
        yield FieldViolation("inputs", "must not be empty")
    for index, each in enumerate(inputs):
        kind = each.WhichOneof("input")
        if kind is None:
            yield FieldViolation(f"inputs[{index}].input", f"one of {forms} must be set")
        elif kind == "text" and not each.text:
            yield FieldViolation(f"inputs[{index}].text", "must not be empty")
        elif kind == "token_ids" and not each.token_ids.ids:
            yield FieldViolation(f"inputs[{index}].token_ids.ids", "must not be empty")


def given(inputs: Sequence[pb.EmbedInput | pb.ClassifyInput]) -> tuple[Input, ...]:
    """The inputs as the engine takes them."""
    return tuple(_given(each) for each in inputs)


def _given(each: pb.EmbedInput | pb.ClassifyInput) -> Input:
    kind = each.WhichOneof("input")
    if isinstance(each, pb.ClassifyInput) and kind == "pair":
        return TextPair(each.pair.first, each.pair.second)
    return each.text if kind == "text" else tuple(each.token_ids.ids)


def embed_response(result: EmbedResult) -> pb.EmbedResponse:
    """The response with all vectors of `result`, which has at least one."""
    return pb.EmbedResponse(
        request_id=public_id(result.request_id),
        embeddings=[_embedding(each) for each in result.embeddings],
        dimension=len(result.embeddings[0].values),
    )


def _embedding(each: Embedding) -> pb.Embedding:
    """The message of one vector, made from its wire form: giving floats one by one takes forty times as long (88 µs for
    4,096)."""
    packed = each.values.astype("<f4").tobytes()
    message = pb.Embedding.FromString(_VALUES_TAG + varint(len(packed)) + packed)
    message.usage.prompt_tokens = each.prompt_tokens
    message.usage.cached_tokens = each.cached_tokens
    return message
