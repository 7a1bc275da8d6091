"""How messages of any dialect become the engine's requests: tables of fields, and the checks that only the wire needs.

Gateway protos have scalars without presence, so an unset `top_p` arrives as 0. A zero that means "off" is read as the
value that switches the option off here. Their floats are singles: 0.7 is read as 0.7 and not as 0.699999988, so that
the same request samples the same tokens through every service.
"""

from __future__ import annotations

import dataclasses
import math
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from google.protobuf.descriptor import FieldDescriptor

from core.config import ADAPTER_NAME
from core.errors import FieldViolation, InvalidRequest
from core.types.constraint import MAX_CALLS_CHARS, Constraint, ConstraintKind
from core.types.io import ModelInfo
from core.types.sampling_params import (
    MAX_LOGIT_BIAS,
    MAX_PROMPT_LOGPROBS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)
from core.types.structural_tags import StructuralTags
from service.wire.generate import MAX_REQUEST_ID_CHARS, REQUEST_ID

PARAMS = "sampling_params"
IDS = "tokenized.input_ids"

_NEUTRAL: Mapping[tuple[str, float], float] = {
    ("top_p", 0): 1.0,
    ("repetition_penalty", 0): 1.0,
    ("n", 0): 1,
    ("top_k", -1): 0,
}
"""(option, value on the wire) -> the value that means the same here."""

MAX_TOLD_BYTES = (4 * 1024 - 256) * 1024
"""Of what is told of a prompt: gRPC's default for the largest message that a client takes, less room for an output."""
TOLD_BYTES, TOP_BYTES, VALUE_BYTES = 9, 5, 4
"""At most, without ids: of a token; of its list of alternatives; of one of them."""

_LIMITS = (("stop", MAX_STOP_STRINGS), ("stop_token_ids", MAX_STOP_TOKEN_IDS), ("logit_bias", MAX_LOGIT_BIAS))


def sampling(message: Any, names: Mapping[str, str], defaults: SamplingParams, **given: Any) -> SamplingParams:
    """The sampling options of `message`; `names` maps the dialect's names to ours. Options in `given` replace them.

    Fields with presence that are not set keep the checkpoint's `defaults`.
    """
    values: dict[str, Any] = {}
    for theirs, ours in names.items():
        if _unset(message, theirs):
            continue
        value = _plain(getattr(message, theirs), message.DESCRIPTOR.fields_by_name[theirs])
        values[ours] = _NEUTRAL.get((ours, value), value) if isinstance(value, int | float) else value
    return dataclasses.replace(defaults, **(values | given))


def _unset(message: Any, name: str) -> bool:
    return message.DESCRIPTOR.fields_by_name[name].has_presence and not message.HasField(name)


def _plain(value: Any, field: FieldDescriptor) -> Any:
    """A scalar as it was meant, a repeated field as a tuple, a map as a dict."""
    if isinstance(value, float):
        return as_written(value)
    if isinstance(value, bool | int | str):
        return value
    if field.message_type is not None:
        return {key: as_written(each) for key, each in value.items()}
    return tuple(value)


def as_written(value: float) -> float:
    """The shortest decimal number that rounds to the same single."""
    return float(str(np.float32(value)))


def request_id(message: Any) -> str:
    """The client's request id; a random one if the message has none."""
    return message.request_id or uuid.uuid4().hex


def id_violations(message: Any, adapter: str = "") -> Iterator[FieldViolation]:
    """The violations of the request id and of the adapter's name."""
    if message.request_id and not REQUEST_ID.fullmatch(message.request_id):
        yield FieldViolation("request_id", f"must be 1 to {MAX_REQUEST_ID_CHARS} characters of A-Z a-z 0-9 . _ : -")
    if adapter and not ADAPTER_NAME.fullmatch(adapter):
        yield FieldViolation("lora_id", "must be 1 to 128 characters of A-Z a-z 0-9 . _ : / -")


def refuse_oversized(message: Any, info: ModelInfo) -> None:
    """Raise InvalidRequest, which names every collection of a Generate that is too large. Nothing is copied before."""
    refuse_long_prompt(message, info)
    params = message.sampling_params
    sized = ((f"{PARAMS}.{name}", len(getattr(params, name)), limit) for name, limit in _LIMITS)
    refuse(
        [FieldViolation(name, f"has {n} entries, at most {most} can be served") for name, n, most in sized if n > most]
    )


def refuse_long_prompt(message: Any, info: ModelInfo) -> None:
    """Raise InvalidRequest if there are more ids than the model takes."""
    count, most = len(message.tokenized.input_ids), info.max_input_length
    if count > most:
        raise InvalidRequest.of(IDS, f"has {count} tokens, but the model takes at most {most}")


def unserved(message: Any, names: Mapping[str, str], prefix: str = "") -> Iterator[FieldViolation]:
    """A violation for every field of `names` that is set, with the reason given there."""
    for field, _ in message.ListFields():
        if field.name in names:
            yield FieldViolation(prefix + field.name, names[field.name])


def rank_violations(message: Any) -> Iterator[FieldViolation]:
    """A violation for a rank other than 0: this server is one rank."""
    if message.data_parallel_rank > 0:
        yield FieldViolation("data_parallel_rank", "this server has rank 0 only")


def prompt_violations(ids: Sequence[int]) -> Iterator[FieldViolation]:
    """A violation for a prompt without token ids. The engine checks their range."""
    if not ids:
        yield FieldViolation(IDS, "must not be empty")


def told_violations(count: int, alternatives: int, vocab_size: int, field: str) -> Iterator[FieldViolation]:
    """A violation for a prompt of which more is told than gateways take: they want all of it in one message."""
    number = math.ceil(vocab_size.bit_length() / 7)
    # How many alternatives there may be is the engine's to say.
    each = min(max(0, alternatives), MAX_PROMPT_LOGPROBS)
    ranked = TOP_BYTES + (VALUE_BYTES + number) * each if each else 0
    most = MAX_TOLD_BYTES // (TOLD_BYTES + number + ranked)
    if count > most:
        words = f"tells of {count} tokens with {alternatives} alternatives each, but at most {most} fit into a message"
        yield FieldViolation(field, words)


def refuse(violations: Sequence[FieldViolation]) -> None:
    """Raise InvalidRequest if there are violations."""
    if violations:
        raise InvalidRequest(list(violations))


def renamed(error: InvalidRequest, names: Mapping[str, str]) -> InvalidRequest:
    """`error` with the dialect's names of fields; an index in brackets after a name stays."""

    def name_of(field: str) -> str:
        stem, bracket, place = field.partition("[")
        return names.get(stem, stem) + bracket + place

    return InvalidRequest([FieldViolation(name_of(each.field), each.description) for each in error.violations])


def structural_tags(text: str) -> Constraint:
    """The constraint that `text` writes in xgrammar's JSON. Raises InvalidRequest, field `structural_tag`."""
    try:
        if len(text) > MAX_CALLS_CHARS:
            raise ValueError(f"must have at most {MAX_CALLS_CHARS} characters")
        return Constraint(ConstraintKind.STRUCTURAL_TAGS, StructuralTags.of_gateway(text).source)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest.of(f"{PARAMS}.structural_tag", str(error)) from None
