"""What is refused of a constraint before any library sees it."""

from __future__ import annotations

import json

import pytest

from core.types.constraint import (
    MAX_CHOICE_CHARS,
    MAX_CHOICES,
    MAX_EBNF_CHARS,
    MAX_REGEX_CHARS,
    MAX_SCHEMA_CHARS,
    MAX_SCHEMA_DEPTH,
    Constraint,
    ConstraintKind,
    conflicts,
)
from core.types.sampling_params import SamplingParams

SCHEMA, REGEX, EBNF = ConstraintKind.JSON_SCHEMA, ConstraintKind.REGEX, ConstraintKind.EBNF


def told(constraint: Constraint) -> str:
    """What is wrong with it, "" if nothing is; at most one thing, of its own field."""
    found = constraint.violations()
    assert len(found) <= 1 and all(each.field == constraint.field for each in found)
    return found[0].description if found else ""


def nested(levels: int, *, lists: bool) -> str:
    """A schema with so many objects, or lists in one object, inside each other."""
    return (
        '{"a":' * levels + "1" + "}" * levels if not lists else '{"a":' + "[" * (levels - 1) + "]" * (levels - 1) + "}"
    )


@pytest.mark.parametrize("lists", [False, True])
def test_a_schema_is_nested_no_deeper_than_the_bound(lists: bool) -> None:
    assert told(Constraint(SCHEMA, nested(MAX_SCHEMA_DEPTH, lists=lists))) == ""
    for levels in (MAX_SCHEMA_DEPTH + 1, 5 * MAX_SCHEMA_DEPTH):
        assert "nested deeper" in told(Constraint(SCHEMA, nested(levels, lists=lists)))
    assert told(Constraint(SCHEMA, nested(20_000, lists=True))) != "", "no recursion of the reader's own gets out"


@pytest.mark.parametrize(("source", "text"), [("nothing", "a JSON text"), ("[]", "a JSON object"), ("", "characters")])
def test_a_schema_is_an_object(source: str, text: str) -> None:
    assert text in told(Constraint(SCHEMA, source))


@pytest.mark.parametrize(
    ("kind", "most"), [(SCHEMA, MAX_SCHEMA_CHARS), (REGEX, MAX_REGEX_CHARS), (EBNF, MAX_EBNF_CHARS)]
)
def test_a_text_is_as_long_as_the_bound_at_most(kind: ConstraintKind, most: int) -> None:
    text = json.dumps({"": "a" * (most - 8)}) if kind is SCHEMA else "a" * most
    assert len(text) == most and told(Constraint(kind, text)) == ""
    assert f"1 to {most} characters" in told(Constraint(kind, text + " "))
    assert f"1 to {most} characters" in told(Constraint(kind, ""))


def test_an_expression_does_not_end_in_half_an_escape() -> None:
    assert [bool(told(Constraint(REGEX, "a" + "\\" * count))) for count in range(5)] == [
        False,
        True,
        False,
        True,
        False,
    ]


def test_choices_are_some_and_none_is_empty() -> None:
    assert told(Constraint.choice(["a"] * MAX_CHOICES)) == told(Constraint.choice(["a" * MAX_CHOICE_CHARS])) == ""
    assert "choices" in told(Constraint.choice([])) and "choices" in told(Constraint.choice(["a"] * (MAX_CHOICES + 1)))
    assert "empty" in told(Constraint.choice(["a", ""]))
    assert "in all" in told(Constraint.choice(["a" * MAX_CHOICE_CHARS, "b"]))


def test_options_that_say_where_an_output_ends_are_refused_beside_it() -> None:
    assert conflicts(SamplingParams()) == []
    both = conflicts(SamplingParams(min_tokens=1, ignore_eos=True))
    assert [each.field for each in both] == ["sampling_params.min_tokens", "sampling_params.ignore_eos"]
