"""The caller's trace context, as W3C's `traceparent` carries it. Needs no OpenTelemetry."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

TRACEPARENT = "traceparent"
_PATTERN = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1


def sampled_trace(metadata: Sequence[tuple[str, Any]] | None) -> str:
    """The 32 hexadecimal digits of the trace that a call belongs to; empty if there is none or it is not sampled.

    Only exact trace ids are returned, so that no other text of a caller gets into exemplars.
    """
    for key, value in metadata or ():
        if key == TRACEPARENT and isinstance(value, str) and (found := _PATTERN.fullmatch(value)):
            trace, parent, flags = found[1], found[2], int(found[3], 16)
            return trace if flags & _SAMPLED and int(trace, 16) and int(parent, 16) else ""
    return ""
