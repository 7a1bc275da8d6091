"""Reads the constraint of a `GenerateRequest`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from core.errors import FieldViolation, InvalidRequest
from core.types.constraint import MAX_SCHEMA_CHARS, MAX_SCHEMA_DEPTH, Constraint, ConstraintKind, is_deeper
from core.types.structural_tags import StructuralTag, StructuralTags
from service.pb.slipstream.v1 import inference_pb2 as pb

_TAGS: Final = "constraint.structural_tags.tags"


def constraint_violations(message: pb.GenerateRequest) -> Iterator[FieldViolation]:
    """What is wrong with the shape of the constraint, and with what it is combined with."""
    if not message.HasField("constraint"):
        return
    if message.constraint.WhichOneof("kind") is None:
        yield FieldViolation("constraint", f"one of {', '.join(_kinds())} must be set")
    choice = message.chat.tool_choice
    if choice.name or choice.mode == pb.TOOL_MODE_REQUIRED:
        yield FieldViolation("constraint", "cannot be combined with chat.tool_choice, which requires a call")


def read_constraint(message: pb.GenerateRequest) -> Constraint | None:
    """The constraint that the outputs must match; None without one. The engine checks its content.

    Raises InvalidRequest for a schema of a tag that is no JSON.
    """
    kind = message.constraint.WhichOneof("kind")
    if kind is None:
        return None
    if kind == "choice":
        return Constraint.choice(list(message.constraint.choice.choices))
    if kind == "structural_tags":
        return Constraint(ConstraintKind.STRUCTURAL_TAGS, _tags(message.constraint.structural_tags).source)
    return Constraint(ConstraintKind(kind), getattr(message.constraint, kind))


def _tags(given: pb.StructuralTags) -> StructuralTags:
    tags, violations = [], []
    for place, tag in enumerate(given.tags):
        try:
            tags.append(StructuralTag(tag.begin, _schema(tag.json_schema), tag.end))
        except (ValueError, RecursionError):
            said = f"must be a JSON object of at most {MAX_SCHEMA_CHARS} characters and {MAX_SCHEMA_DEPTH} levels"
            violations.append(FieldViolation(f"{_TAGS}[{place}].json_schema", said))
    if violations:
        raise InvalidRequest(violations)
    return StructuralTags(tuple(tags), tuple(given.triggers), given.at_least_one, given.stop_after_first)


def _schema(text: str) -> Any:
    if len(text) > MAX_SCHEMA_CHARS:
        raise ValueError(f"{len(text)} characters")
    found = json.loads(text) if text else True
    if not (isinstance(found, dict) or found is True):
        raise ValueError("no object")
    if is_deeper(found, MAX_SCHEMA_DEPTH):
        raise ValueError("too deep")
    return found


def _kinds() -> list[str]:
    return [field.name for field in pb.Constraint.DESCRIPTOR.oneofs_by_name["kind"].fields]
