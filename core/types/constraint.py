"""What an output must look like: a JSON schema, a regular expression, a grammar, or one of a few strings."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from core.errors import FieldViolation
from core.types.sampling_params import SamplingParams
from core.types.structural_tags import StructuralTags

MAX_SCHEMA_CHARS = 65_536
MAX_SCHEMA_DEPTH = 64
TOO_DEEP = f"must not be nested deeper than {MAX_SCHEMA_DEPTH} levels"
_AROUND_TAGS = 4
"""Levels that a list of tags adds to those of their schemas."""
MAX_CALLS_CHARS = 131_072
MAX_REGEX_CHARS = 8_192
MAX_EBNF_CHARS = 65_536
MAX_CHOICES = 1_024
MAX_CHOICE_CHARS = 65_536
"""Of all choices together."""


class ConstraintKind(Enum):
    """The forms of a constraint; the values are the names of the fields in the API."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    EBNF = "ebnf"
    CHOICE = "choice"
    STRUCTURAL_TAGS = "structural_tags"
    """The source of a `StructuralTags`."""
    CALLS = "calls"
    """Calls of tools, as `core.text.answers.call_grammar` writes them: no client does."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """One constraint as the client wrote it. `source`: its text, or a JSON list of the choices."""

    kind: ConstraintKind
    source: str

    @classmethod
    def choice(cls, choices: list[str]) -> Constraint:
        """One of `choices`, word for word."""
        return cls(ConstraintKind.CHOICE, json.dumps(choices))

    @property
    def field(self) -> str:
        """The protobuf path of the field that holds it in a request, for error messages."""
        if self.kind is ConstraintKind.CALLS:
            return "chat.tools"
        return f"constraint.{self.kind.value}"

    def violations(self) -> list[FieldViolation]:
        """What is wrong with it, found before anything is compiled. Sizes come first, to keep any check cheap."""
        return [FieldViolation(self.field, text) for text in _CHECKS[self.kind](self.source)]


def conflicts(params: SamplingParams) -> list[FieldViolation]:
    """Options that contradict a constraint: it alone decides where an output may end."""
    text = "cannot be combined with constraint, which decides where the output may end"
    found = [("min_tokens", params.min_tokens > 0), ("ignore_eos", params.ignore_eos)]
    return [FieldViolation(f"sampling_params.{name}", text) for name, wrong in found if wrong]


def _schema(source: str) -> Iterator[str]:
    if not 1 <= len(source) <= MAX_SCHEMA_CHARS:
        yield f"must have 1 to {MAX_SCHEMA_CHARS} characters"
        return
    try:
        schema = json.loads(source)
    except RecursionError:
        yield TOO_DEEP
        return
    except ValueError as error:
        yield "must be a JSON text" if isinstance(error, json.JSONDecodeError) else "has a number of too many digits"
        return
    if not isinstance(schema, dict):
        yield "must be a JSON object"
    elif is_deeper(schema, MAX_SCHEMA_DEPTH):
        yield TOO_DEEP


def _structural_tags(source: str) -> Iterator[str]:
    if len(source) > MAX_CALLS_CHARS:
        yield f"must have at most {MAX_CALLS_CHARS} characters"
    elif is_deeper(json.loads(source), MAX_SCHEMA_DEPTH + _AROUND_TAGS):
        yield TOO_DEEP
    else:
        yield from StructuralTags.of_source(source).faults()


def _calls(source: str) -> Iterator[str]:
    if len(source) > MAX_CALLS_CHARS:
        yield f"must have at most {MAX_CALLS_CHARS} characters where calls of them are required"
    elif is_deeper(json.loads(source), MAX_SCHEMA_DEPTH):
        yield f"must not be nested deeper than {MAX_SCHEMA_DEPTH} levels where calls of them are required"


def is_deeper(value: object, limit: int) -> bool:
    """Whether lists and objects in `value` are nested more than `limit` deep; level by level, without recursion."""
    level = [value]
    for _ in range(limit):
        inner: list[object] = []
        for each in level:
            if isinstance(each, dict):
                inner.extend(each.values())
            elif isinstance(each, list):
                inner.extend(each)
        level = [each for each in inner if isinstance(each, dict | list)]
        if not level:
            return False
    return True


def _regex(source: str) -> Iterator[str]:
    if not 1 <= len(source) <= MAX_REGEX_CHARS:
        yield f"must have 1 to {MAX_REGEX_CHARS} characters"
    elif (len(source) - len(source.rstrip("\\"))) % 2:
        # llguidance writes the expression into a literal, which a lone backslash at the end would break.
        yield "must not end in a lone backslash"


def _ebnf(source: str) -> Iterator[str]:
    if not 1 <= len(source) <= MAX_EBNF_CHARS:
        yield f"must have 1 to {MAX_EBNF_CHARS} characters"


def _choice(source: str) -> Iterator[str]:
    choices = json.loads(source)
    if not 1 <= len(choices) <= MAX_CHOICES:
        yield f"must have 1 to {MAX_CHOICES} choices"
    elif not all(choices):
        yield "must have no empty choice"
    elif sum(map(len, choices)) > MAX_CHOICE_CHARS:
        yield f"must have at most {MAX_CHOICE_CHARS} characters in all"


_CHECKS = {
    ConstraintKind.JSON_SCHEMA: _schema,
    ConstraintKind.REGEX: _regex,
    ConstraintKind.EBNF: _ebnf,
    ConstraintKind.CHOICE: _choice,
    ConstraintKind.STRUCTURAL_TAGS: _structural_tags,
    ConstraintKind.CALLS: _calls,
}
