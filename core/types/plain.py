"""Plain data as JSON values: dataclasses, enums and columns of numbers become objects, values and lists."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, Final

from core.types.logprobs import TokenLogprobs

BASE64: Final = "base64"


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def to_plain(value: Any, of_bytes: Callable[[bytes], str] = _base64) -> Any:
    """JSON values. Enums become their values, tuples lists, and bytes an object with their base64, or with what
    `of_bytes` makes of them.
    """
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, bytes):
        return {BASE64: of_bytes(value)}
    if isinstance(value, Mapping):
        return {key: to_plain(each, of_bytes) for key, each in value.items()}
    if isinstance(value, tuple | list | TokenLogprobs):
        return [to_plain(each, of_bytes) for each in value]
    if dataclasses.is_dataclass(value):
        return {field.name: to_plain(getattr(value, field.name), of_bytes) for field in dataclasses.fields(value)}
    return value
