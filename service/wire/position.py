"""A place in a stream, as a client that attaches gives it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Position:
    """How much of one output a reader has."""

    tokens: int = 0
    text_bytes: int = 0
    finished: bool = False
