"""The history checker: a pure function over what clients saw, against what the device must have made.

It knows no server. A stream that ended early must have seen a correct prefix; one that ended in full, everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

FULL = "length"
LEFT = "left"
"""The client went away, so no terminal was due to reach it."""


@dataclass
class Stream:
    """What one client saw of one output. `events` are (position, tokens, seconds), in order of arrival."""

    prompt: list[int]
    asked: int
    request_id: str = ""
    events: list[tuple[int, tuple[int, ...], float]] = field(default_factory=list)
    foreign: int = 0
    """Events that carried another request's id."""
    terminals: list[str] = field(default_factory=list)
    """Finish reasons and status reasons, or LEFT."""
    after_terminal: int = 0
    reported: int | None = None
    """Tokens as the server counts them: usage of the terminal, or the trailer of a failure."""

    @property
    def received(self) -> int:
        """Tokens that arrived, repeated ones included."""
        return sum(len(tokens) for _, tokens, _ in self.events)


@dataclass(frozen=True)
class Verdict:
    """Faults over all streams; each is 0 in a correct history."""

    duplicated: int = 0
    missing: int = 0
    wrong: int = 0
    beyond: int = 0
    """Tokens past what was asked for."""
    terminals: int = 0
    """Streams with another number of terminals than one."""
    after_terminal: int = 0
    foreign: int = 0
    miscounted: int = 0
    """Streams whose terminal reports another number of tokens than could have arrived."""

    def __add__(self, other: Verdict) -> Verdict:
        mine, theirs = vars(self), vars(other)
        return Verdict(**{name: mine[name] + theirs[name] for name in mine})


def judge(stream: Stream, expected: list[int]) -> Verdict:
    """One stream against `expected`, the whole output that it asked for."""
    seen: dict[int, int] = {}
    duplicated = wrong = beyond = 0
    for position, tokens, _ in stream.events:
        for place, token in enumerate(tokens, position):
            duplicated += place in seen
            seen[place] = token
            beyond += place >= len(expected)
            wrong += place < len(expected) and token != expected[place]
    due = len(expected) if stream.terminals == [FULL] else max(seen, default=-1) + 1
    return Verdict(
        duplicated=duplicated,
        missing=due - len(set(seen) & set(range(due))),
        wrong=wrong,
        beyond=beyond,
        terminals=int(len(stream.terminals) != 1),
        after_terminal=stream.after_terminal,
        foreign=stream.foreign,
        miscounted=int(_miscounted(stream)),
    )


def _miscounted(stream: Stream) -> bool:
    if stream.reported is None:
        return False
    if stream.terminals == [FULL]:
        return stream.reported != stream.received
    return stream.reported < stream.received


def check(streams: Iterable[Stream], expected: Callable[[Stream], list[int]]) -> Verdict:
    """All streams of a history."""
    return sum((judge(stream, expected(stream)) for stream in streams), Verdict())
