"""Random constraints of every kind, each with a judge of its own: `re`, `jsonschema`, or the list itself."""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jsonschema
import regex

from core.types.constraint import Constraint, ConstraintKind

LETTERS = "abcxyz019 _"
SPECIAL = '.*+?()[]{}|^$#&"\\/<>-~äß€'
DEPTH = 3


_EVERY_CHARACTER = "".join(map(chr, range(sys.maxunicode + 1)))
NEWER_DIGITS = {
    ord(digit): "\u0660" for digit in {*regex.findall(r"\d", _EVERY_CHARACTER)} - {*re.findall(r"\d", _EVERY_CHARACTER)}
}
"""Digits that came into Unicode after this Python, to one that it knows: the libraries let them through for `\\d`."""


@dataclass(frozen=True)
class Judged:
    """A constraint, and whether a text meets it."""

    constraint: Constraint
    by: Callable[[str], bool]

    def meets(self, text: str) -> bool:
        """No constraint drawn here tells a digit beyond ASCII from another."""
        return self.by(text.translate(NEWER_DIGITS))


def draw(rng: random.Random) -> Judged:
    """One of any kind."""
    return rng.choice((_regex, _schema, _ebnf, _choice))(rng)


def spoil(rng: random.Random, constraint: Constraint) -> Constraint:
    """Its text with a few characters dropped, doubled or changed; often still one that can be met."""
    text = list(constraint.source)
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(text)) if text else 0
        change = rng.randrange(3)
        text[place : place + 1] = ("", text[place : place + 1] * 2, rng.choice(LETTERS + SPECIAL))[change]
    return Constraint(constraint.kind, "".join(text))


def _regex(rng: random.Random) -> Judged:
    pattern = _pattern(rng, DEPTH)
    compiled = re.compile(pattern)
    return Judged(Constraint(ConstraintKind.REGEX, pattern), lambda text: compiled.fullmatch(text) is not None)


def _pattern(rng: random.Random, depth: int) -> str:
    kind = rng.randrange(7 if depth else 3)
    if kind < 2:
        return "".join(map(re.escape, rng.choices(LETTERS.strip() + ".+(", k=rng.randint(1, 4))))
    if kind == 2:
        return rng.choice(("[a-f]", "[0-9]", "[^a-z]", "[xyz_]", r"\d", "[A-Za-z ]"))
    if kind == 3:
        return "(" + "|".join(_pattern(rng, depth - 1) for _ in range(rng.randint(2, 4))) + ")"
    if kind == 4:
        return f"({_pattern(rng, depth - 1)}){rng.choice(('?', '*', '+', '{2}', '{1,3}', '{0,2}'))}"
    return _pattern(rng, depth - 1) + _pattern(rng, depth - 1)


def _choice(rng: random.Random) -> Judged:
    choices = ["".join(rng.choices(LETTERS + SPECIAL, k=rng.randint(1, 9))) for _ in range(rng.randint(1, 9))]
    return Judged(Constraint.choice(choices), lambda text: text in choices)


def _ebnf(rng: random.Random) -> Judged:
    """Rules that name only later ones, so that a regular expression of Python says the same."""
    rules: list[tuple[str, str]] = []
    for number in reversed(range(rng.randint(1, 5))):
        parts = [rng.choice(rules)[0] if rules and rng.random() < 0.5 else "" for _ in range(rng.randint(1, 3))]
        texts = ["".join(rng.choices(LETTERS, k=rng.randint(1, 3))) for _ in parts]
        tails = [rng.choice(("", "", "?", "{1,2}")) for _ in parts]
        known = dict(rules)
        grammar = " | ".join(
            f"{json.dumps(text)} {f'({part}){tail}' if part else ''}"
            for text, part, tail in zip(texts, parts, tails, strict=True)
        )
        pattern = "|".join(
            re.escape(text) + (f"(?:{known[part].split(chr(0))[1]}){tail}" if part else "")
            for text, part, tail in zip(texts, parts, tails, strict=True)
        )
        name = "root" if number == 0 else f"rule{number}"
        rules.append((name, f"{name} ::= {grammar}\0{pattern}"))
    compiled = re.compile(dict(rules)["root"].split("\0")[1])
    source = "".join(rule.split("\0")[0] + "\n" for _, rule in reversed(rules))
    return Judged(Constraint(ConstraintKind.EBNF, source), lambda text: compiled.fullmatch(text) is not None)


def _schema(rng: random.Random) -> Judged:
    schema = _node(rng, DEPTH)
    validator = jsonschema.Draft202012Validator(schema)
    return Judged(
        Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema)), lambda text: validator.is_valid(json.loads(text))
    )


def _node(rng: random.Random, depth: int) -> dict[str, Any]:
    """Everything has an end that is near, as nobody is there who would want to end."""
    kind = rng.randrange(9 if depth else 6)
    if kind == 0:
        low = rng.randint(-99, 99)
        return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 500)}
    if kind == 1:
        return {"type": "string", "minLength": rng.randint(0, 2), "maxLength": rng.randint(2, 6)}
    if kind == 2:
        return {"enum": rng.sample(["a", "b c", 1, -2.5, None, True, 'q"\\', {"x": [1]}, [0], "€"], rng.randint(1, 5))}
    if kind == 3:
        return {"type": rng.choice(("boolean", "null"))}
    if kind == 4:
        return {"const": rng.choice(["fixed", 7, {"a": None}])}
    if kind == 5:
        return {"type": "string", "pattern": f"^{_pattern(rng, 1)}$"} if rng.random() < 0.5 else {"type": "boolean"}
    if kind == 6:
        return {"anyOf": [_node(rng, depth - 1) for _ in range(rng.randint(1, 3))]}
    if kind == 7:
        low = rng.randint(0, 2)
        items = _node(rng, depth - 1)
        return {"type": "array", "items": items, "minItems": low, "maxItems": low + rng.randint(0, 2)}
    names = rng.sample(["id", "name", "a b", "ä", "$ref?", "x"], rng.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: _node(rng, depth - 1) for name in names},
        "required": names[: rng.randint(0, len(names))],
        "additionalProperties": False,
    }
