"""Every field of Attach at its edges, and what makes a stream one that can be attached to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from service.pb.slipstream.v1 import inference_pb2 as pb
from tests.security.edges import INT32, STRINGS, Edge, generate, short


def attaches() -> Iterator[Edge]:
    """Streams that outlive their call, and coming back for those that never were."""
    for value in (False, True):
        yield generate(f"resumable={value}", resumable=value, **short())
        yield generate(f"speculative={value}", speculative=value, **short())
    yield attach("no id", "request_id", request_id="")
    for name, text in STRINGS.items():
        if text:
            yield attach(f"an id of {name}", request_id=text)
    yield attach("an id of a million", request_id="x" * 1_000_000)
    for length in (64, 65, 1_000_000):
        refused = None if length <= 64 else "incarnation"
        yield attach(f"an incarnation of {length}", refused, incarnation="x" * length)
    for field in ("index", "tokens", "text_bytes"):
        for value in (*INT32, -1, 0, 1):
            named = None if value >= 0 else f"positions[0].{field}"
            yield attach(f"{field}={value}", named, positions=[pb.AttachPosition(**{field: value})])
    for value in (False, True):
        yield attach(f"finished={value}", positions=[pb.AttachPosition(finished=value)])
    yield attach("a place twice", "positions[1].index", positions=[pb.AttachPosition()] * 2)
    for count in (64, 65, 100_000):
        places = [pb.AttachPosition(index=index) for index in range(count)]
        yield attach(f"{count} places", None if count <= 64 else "positions", positions=places)


def attach(name: str, refused: str | None = None, /, **fields: Any) -> Edge:
    """An Attach call for a stream that is not there."""
    return Edge("Attach", name, pb.AttachRequest(**({"request_id": "gone"} | fields)), refused, absent=refused is None)
