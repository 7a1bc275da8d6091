"""Requests, events and errors as JSON values and back: dataclasses by their annotations, errors by their names.

Dataclasses go out by `core.types.plain.to_plain` and are read here. Deltas are no JSON but rows of an EVENTS frame
(`service.frontends.events`).
"""

from __future__ import annotations

import base64
import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, Final, TypeVar, Union

import numpy as np

from core import errors
from core.errors import FieldViolation, InvalidRequest, Overloaded, QueueTimeout, SlipstreamError
from core.types.io import Embedding, EmbedResult
from core.types.plain import BASE64
from service import errors as service_errors

Made = TypeVar("Made")

UNREADABLE: Final = "a message between the processes of this server could not be read"
"""The error text of a request whose frame cannot be decoded."""

_ERRORS: dict[str, type[SlipstreamError]] = {
    name: kind
    for room in (errors, service_errors)
    for name, kind in vars(room).items()
    if isinstance(kind, type) and issubclass(kind, SlipstreamError)
}


def from_plain(kind: type[Made], value: Any) -> Made:
    """Make the dataclass `kind` of JSON values. Raises KeyError, TypeError or ValueError if they do not fit it."""
    return kind(**{name: _read(_hints(kind)[name], each) for name, each in value.items()})


def _hints(kind: Any) -> dict[str, Any]:
    """The type of each field, by name. Kept per `kind`, since `typing.get_type_hints` is slow."""
    if kind not in _KNOWN:
        hints = typing.get_type_hints(kind)
        _KNOWN[kind] = {each.name: hints[each.name] for each in dataclasses.fields(kind)}
    return _KNOWN[kind]


_KNOWN: dict[Any, dict[str, Any]] = {}


def _read(hint: Any, value: Any) -> Any:
    if value is None:
        return None
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return _read(_fitting(args, value), value)
    if origin is Sequence:
        return tuple(_read(args[0], each) for each in value)
    if origin is tuple:
        return tuple(_read(each, v) for each, v in zip(args if args[-1] is not ... else args[:1] * len(value), value))
    if origin is not None and issubclass(origin, Mapping):
        return {args[0](key): _read(args[1], each) for key, each in value.items()}
    if hint is bytes:
        return base64.b64decode(value[BASE64])
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint(value)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return from_plain(hint, value)
    return value


def _fitting(kinds: tuple[Any, ...], value: Any) -> Any:
    """The kind of a union by which `value` is read: a list as one of many, an object as a dataclass or bytes."""
    if isinstance(value, list):
        return next((kind for kind in kinds if typing.get_origin(kind) in (tuple, Sequence)), object)
    if isinstance(value, dict):
        return next((kind for kind in kinds if dataclasses.is_dataclass(kind) or kind is bytes), object)
    return object


def error_to_plain(error: BaseException) -> dict[str, Any]:
    """JSON values of a typed error. Any other error becomes one without a name; its text stays in this process."""
    name = type(error).__name__
    if not isinstance(error, SlipstreamError) or name not in _ERRORS:
        return {"error": ""}
    plain: dict[str, Any] = {"error": name, "message": error.message}
    if isinstance(error, InvalidRequest):
        plain["violations"] = [[each.field, each.description] for each in error.violations]
    if isinstance(error, Overloaded):
        plain |= {"reason": error.reason, "retry_after": error.retry_after}
    return plain


def error_from_plain(plain: Mapping[str, Any]) -> Exception:
    """The error of `error_to_plain`. One without a name is a RuntimeError, which clients see as an incident."""
    kind = _ERRORS.get(plain["error"])
    if kind is None:
        return RuntimeError("the engine process failed on this request; its log says why")
    if kind is InvalidRequest:
        return InvalidRequest([FieldViolation(*each) for each in plain["violations"]])
    if issubclass(kind, Overloaded) and kind is not QueueTimeout:
        return kind(plain["message"], reason=plain["reason"], retry_after=plain["retry_after"])
    return kind(plain["message"])


def vectors_to_plain(result: EmbedResult) -> dict[str, Any]:
    """JSON values of the result: each vector as base64 of its float32 bytes, little endian."""
    rows = [
        [base64.b64encode(each.values.astype("<f4").tobytes()).decode(), each.prompt_tokens, each.cached_tokens]
        for each in result.embeddings
    ]
    return {"request_id": result.request_id, "embeddings": rows}


def vectors_from_plain(plain: Mapping[str, Any]) -> EmbedResult:
    """The result of `vectors_to_plain`."""
    embeddings = (
        Embedding(np.frombuffer(base64.b64decode(values), "<f4"), prompt, cached)
        for values, prompt, cached in plain["embeddings"]
    )
    return EmbedResult(plain["request_id"], tuple(embeddings))
