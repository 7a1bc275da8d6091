"""Plain data as JSON values: dataclasses, enums and columns of numbers become objects, values and lists."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import Enum
from typing import Any

from core.types.logprobs import TokenLogprobs


def to_plain(value: Any) -> Any:
    """JSON values. Enums become their values, tuples lists."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {key: to_plain(each) for key, each in value.items()}
    if isinstance(value, tuple | list | TokenLogprobs):
        return [to_plain(each) for each in value]
    if dataclasses.is_dataclass(value):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return value
