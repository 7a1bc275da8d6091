"""Plain data as JSON values: dataclasses, enums and columns of numbers become objects, values and lists."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Mapping
from enum import Enum
from typing import Any, Final

from core.types.logprobs import TokenLogprobs

BASE64: Final = "base64"


def to_plain(value: Any) -> Any:
    """JSON values. Enums become their values, tuples lists, and bytes an object with their base64."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, bytes):
        return {BASE64: base64.b64encode(value).decode("ascii")}
    if isinstance(value, Mapping):
        return {key: to_plain(each) for key, each in value.items()}
    if isinstance(value, tuple | list | TokenLogprobs):
        return [to_plain(each) for each in value]
    if dataclasses.is_dataclass(value):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return value
