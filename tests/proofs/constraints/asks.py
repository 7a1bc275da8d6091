"""Requests with constraints, and whether an output meets its own."""

from __future__ import annotations

import importlib.util
import json
import random
import re
from typing import Any

import jsonschema
import pytest

from service.client import Completion
from tests.support.checkpoints import VOCAB_SIZE

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
REGEX = r"[0-9]{3}-[a-z]{2,5}"
CHOICES = ["yes", "no", "perhaps tomorrow", "a|b (c)"]
EBNF = 'root ::= "<" item ">"\nitem ::= "x" | "(" item ")"\n'
NESTED = re.compile(r"<(\(*)x(\)*)>")

CONSTRAINTS: tuple[dict[str, Any], ...] = (
    {"json_schema": SCHEMA},
    {"regex": REGEX},
    {"choice": CHOICES},
    {"ebnf": EBNF},
)

OPTIONS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 2.0, "top_k": 3},
    {"temperature": 1.0, "top_p": 0.5, "logprobs": True, "top_logprobs": 2},
    {"temperature": 0.8, "frequency_penalty": 2.0, "repetition_penalty": 1.7},
    {"temperature": 1.0, "n": 2},
    # The mask wins: none of these may appear where the grammar does not want them.
    {"temperature": 1.0, "logit_bias": dict.fromkeys(range(3, 40), 100.0)},
)

BACKENDS = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            importlib.util.find_spec(name) is None, reason=f"{name} is not installed (extra [grammar])"
        ),
    )
    for name in ("llguidance", "xgrammar")
]


def mixed(count: int, seed: int) -> list[dict[str, Any]]:
    """`count` requests, three in four with a constraint, each with a prompt and a seed of its own."""
    rng = random.Random(seed)
    asked: list[dict[str, Any]] = []
    for number in range(count):
        prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 40))]
        ask = {"prompt": prompt, "seed": rng.getrandbits(40), **OPTIONS[number % len(OPTIONS)]}
        kind = number % 5
        if kind < len(CONSTRAINTS):
            asked.append({**ask, "constraint": CONSTRAINTS[kind], "max_tokens": 60})
        else:
            asked.append({**ask, "max_tokens": 30, "ignore_eos": True})
    return asked


def meets(constraint: dict[str, Any], done: Completion) -> bool:
    """Whether a finished output matches as a whole; one that was cut is not looked at."""
    if done.end.reason == "length":
        return True
    ((kind, value),) = constraint.items()
    if kind == "choice":
        return done.text in value
    if kind == "regex":
        return re.fullmatch(value, done.text) is not None
    if kind == "ebnf":
        match = NESTED.fullmatch(done.text)
        return match is not None and len(match[1]) == len(match[2])
    jsonschema.validate(json.loads(done.text), value)
    return True
