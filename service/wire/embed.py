"""Translates Embed between the wire and the engine, as `service.wire.generate` does for generation."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

from core.errors import FieldViolation, InvalidRequest
from core.types.io import Embedding, EmbedRequest, EmbedResult, ModelInfo, Pooling
from service.pb.slipstream.v1 import inference_pb2 as pb
from service.tenant_ids import public_id
from service.wire.generate import id_violations, queue_timeout_violations, seconds
from service.wire.message_limits import refuse_oversized_embed

_POOLINGS = {
    pb.POOLING_UNSPECIFIED: Pooling.LAST,
    pb.POOLING_LAST: Pooling.LAST,
    pb.POOLING_MEAN: Pooling.MEAN,
    pb.POOLING_CLS: Pooling.CLS,
}

_VALUES_TAG = bytes([pb.Embedding.VALUES_FIELD_NUMBER << 3 | 2])
"""The byte before the packed floats of an Embedding: the field's number, and the wire type of a length that follows."""


def embed_request(message: pb.EmbedRequest, info: ModelInfo, max_queued: int, deadline: float | None) -> EmbedRequest:
    """The request as the engine takes it. It gets a random id if the client gave none.

    `deadline` is a `time.monotonic()` instant. More inputs than `max_queued` are refused: they could never be queued.
    Raises InvalidRequest, which names every bad field at once.
    """
    refuse_oversized_embed(message, info, max_queued)
    violations = [*id_violations(message), *_input_violations(message), *queue_timeout_violations(message)]
    pooling = _POOLINGS.get(message.pooling)
    if pooling is None:
        violations.append(FieldViolation("pooling", "is not a pooling that this server knows"))
    if violations or pooling is None:
        raise InvalidRequest(violations)
    return EmbedRequest(
        inputs=tuple(_given(each) for each in message.inputs),
        request_id=message.request_id or uuid.uuid4().hex,
        pooling=pooling,
        normalize=message.normalize if message.HasField("normalize") else True,
        dimensions=message.dimensions if message.HasField("dimensions") else None,
        priority=message.priority,
        queue_timeout=seconds(message.queue_timeout) if message.HasField("queue_timeout") else None,
        deadline=deadline,
        cache_salt=message.cache_salt,
        adapter=message.adapter,
    )


def _input_violations(message: pb.EmbedRequest) -> Iterator[FieldViolation]:
    if not message.inputs:
        yield FieldViolation("inputs", "must not be empty")
    for index, each in enumerate(message.inputs):
        kind = each.WhichOneof("input")
        if kind is None:
            yield FieldViolation(f"inputs[{index}].input", "one of text or token_ids must be set")
        elif kind == "text" and not each.text:
            yield FieldViolation(f"inputs[{index}].text", "must not be empty")
        elif kind == "token_ids" and not each.token_ids.ids:
            yield FieldViolation(f"inputs[{index}].token_ids.ids", "must not be empty")


def _given(each: pb.EmbedInput) -> str | tuple[int, ...]:
    return each.text if each.WhichOneof("input") == "text" else tuple(each.token_ids.ids)


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
    message = pb.Embedding.FromString(_VALUES_TAG + _varint(len(packed)) + packed)
    message.usage.prompt_tokens = each.prompt_tokens
    message.usage.cached_tokens = each.cached_tokens
    return message


def _varint(number: int) -> bytes:
    """`number` as protobuf writes it: seven bits a byte, lowest first, the high bit set on all but the last."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)
