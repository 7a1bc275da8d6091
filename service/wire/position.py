"""A position in a stream, as a client that attaches gives it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Position:
    """The part of one output that a reader has: tokens, bytes of UTF-8 text, and whether it has the terminal."""

    tokens: int = 0
    text_bytes: int = 0
    finished: bool = False
