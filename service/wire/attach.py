"""Reads the positions in an Attach message, from which a client wants to go on."""

from __future__ import annotations

from collections.abc import Iterator

from core.errors import FieldViolation, InvalidRequest
from core.types.sampling_params import MAX_N
from service.pb.slipstream.v1 import inference_pb2 as pb
from service.wire.position import Position

MAX_INCARNATION = 64
"""Characters of an incarnation at most; the server draws shorter ones."""


def positions(message: pb.AttachRequest) -> dict[int, Position]:
    """The position of each output that the message names. Raises InvalidRequest, which names every bad field."""
    if len(message.positions) > MAX_N:
        raise InvalidRequest.of("positions", f"has {len(message.positions)} entries, at most {MAX_N} can be served")
    violations = list(_violations(message))
    if violations:
        raise InvalidRequest(violations)
    return {each.index: Position(each.tokens, each.text_bytes, each.finished) for each in message.positions}


def _violations(message: pb.AttachRequest) -> Iterator[FieldViolation]:
    if not message.request_id:
        yield FieldViolation("request_id", "must not be empty")
    if len(message.incarnation) > MAX_INCARNATION:
        yield FieldViolation("incarnation", f"has more than {MAX_INCARNATION} characters; send that of `started`")
    seen: set[int] = set()
    for place, each in enumerate(message.positions):
        for name in ("index", "tokens", "text_bytes"):
            if getattr(each, name) < 0:
                yield FieldViolation(f"positions[{place}].{name}", "must not be negative")
        if each.index in seen:
            yield FieldViolation(f"positions[{place}].index", "is named twice")
        seen.add(each.index)
