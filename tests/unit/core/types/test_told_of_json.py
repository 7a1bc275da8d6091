"""JSON that is refused is told what is wrong with it: what Python cannot read may be JSON all the same."""

from __future__ import annotations

import sys

import pytest

from core.errors import InvalidRequest
from core.text.conversation import Conversation
from core.types.chat import ChatMessage
from core.types.constraint import TOO_DEEP, Constraint, ConstraintKind

DEEP = '{"a":' * 100_000 + "1" + "}" * 100_000
LONG = '{"maximum": ' + "9" * (sys.get_int_max_str_digits() + 1) + "}"


def told(source: str) -> list[str]:
    return [each.description for each in Constraint(ConstraintKind.JSON_SCHEMA, source).violations()]


def test_a_schema_that_is_nested_too_deep() -> None:
    assert told('{"a":' * 9_000 + "1" + "}" * 9_000) == [TOO_DEEP]
    assert told('{"a":' * 70 + "1" + "}" * 70) == [TOO_DEEP]


def test_a_schema_with_a_number_of_very_many_digits() -> None:
    assert told(LONG) == ["has a number of too many digits"]
    assert told("{") == ["must be a JSON text"] and told("[]") == ["must be a JSON object"]


@pytest.mark.parametrize(
    ("arguments", "says"), [(DEEP, "nested more than"), (LONG, "too many digits"), ("{", "not valid JSON")]
)
def test_arguments_of_a_template(arguments: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        Conversation.of([ChatMessage("user", "a")], (), arguments, {})
