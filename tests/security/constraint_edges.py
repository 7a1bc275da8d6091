"""Every member of a constraint at its edges; part of the table of `edges`."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

from service.pb.slipstream.v1 import inference_pb2 as pb
from tests.security.edges import Edge, generate

LIBRARY = any(importlib.util.find_spec(name) is not None for name in ("llguidance", "xgrammar"))
"""Whether constraints can be served here; without, each that is in range names `constraint`."""


def constrained(name: str, refused: str | None = None, /, **fields: Any) -> Edge:
    """A Generate call of two tokens with a constraint; `refused` is the member to be named."""
    named = f"constraint.{refused}" if refused else None if LIBRARY else "constraint"
    wanted = pb.Constraint(**fields)
    return generate(f"constraint {name}", named, constraint=wanted, sampling_params=pb.SamplingParams(max_tokens=2))


def constraints() -> Iterator[Edge]:
    """Each form at its limits, what is none, and the options that contradict it."""
    yield generate("a constraint of nothing", "constraint", constraint=pb.Constraint())
    for length in (0, 1, 8_192, 8_193, 1_000_000):
        # One class, however long: what a regex costs to follow is another limit than its length.
        regex = "a" * length if length < 2 else "[" + "a" * (length - 2) + "]"
        yield constrained(f"a regex of {length}", None if 1 <= length <= 8_192 else "regex", regex=regex)
    for text in ("(", "[", "*", "a{2,1}", "\\", "(?=a)", "(a)\\1"):
        yield constrained(f"the regex {text!r}", "regex" if LIBRARY else None, regex=text)
    for count, fits in ((0, False), (1, True), (128, True), (129, False), (100_000, False)):
        each = [pb.StructuralTag(begin=f"<f{place}=", json_schema="{}", end=">") for place in range(count)]
        tags = pb.StructuralTags(tags=each, triggers=["<f"], at_least_one=True, stop_after_first=True)
        yield constrained(f"{count} tags", None if fits else "structural_tags", structural_tags=tags)
    for text in ("", "x", "1", "[]", "null", "{", '"a"', "NaN", "[" * 100_000, '{"type": "nothing"}', '{"not": 5}'):
        served = not LIBRARY and text.startswith('{"')
        yield constrained(f"the schema {text[:20]!r}", None if served else "json_schema", json_schema=text)
    for depth in (1, 20, 64, 65, 1000, 10_000):
        text = '{"items":' * depth + "{}" + "}" * depth
        yield constrained(f"a schema {depth} deep", None if depth < 64 else "json_schema", json_schema=text)
    for length in (65_537, 1_000_000):
        yield constrained(f"a schema of {length}", "json_schema", json_schema='{"title":"' + "x" * length + '"}')
    for length in (0, 65_537, 1_000_000):
        yield constrained(f"a grammar of {length}", "ebnf", ebnf="x" * length)
    yield constrained("a grammar", ebnf='root ::= "a" | "b" root')
    yield constrained("a grammar without a root", "ebnf" if LIBRARY else None, ebnf='leaf ::= "a"')
    for count in (0, 1, 1_024, 1_025, 100_000):
        fine = 1 <= count <= 1_024
        yield constrained(f"{count} choices", None if fine else "choice", choice=pb.Choice(choices=["a"] * count))
    yield constrained("an empty choice", "choice", choice=pb.Choice(choices=["a", ""]))
    yield constrained("a long choice", "choice", choice=pb.Choice(choices=["x" * 65_537]))
    wanted = pb.Constraint(regex="a+")
    for name, value in (("min_tokens", 1), ("ignore_eos", True)):
        params = pb.SamplingParams(max_tokens=2, **{name: value})
        yield generate(f"{name} with it", f"sampling_params.{name}", constraint=wanted, sampling_params=params)
