"""What a run did, for people and for comparison: a readable log while tracing, one number otherwise."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

TAIL = 60
"""Lines of a failing run that are shown."""


class Violation(AssertionError):
    """An oracle of the simulation saw something that must not be. `oracle` is its short, stable name."""

    def __init__(self, oracle: str, text: str) -> None:
        self.oracle = oracle
        super().__init__(f"{oracle}: {text}")


class Story:
    """Lines of one run. `digest` sums up every decision, so that two runs can be compared without keeping either."""

    def __init__(self, *, tracing: bool = False, keep: int | None = None) -> None:
        self.tracing = tracing
        self.lines: deque[str] = deque(maxlen=keep)
        self.digest = 0
        self.step = 0

    def decided(self, numbers: tuple[Any, ...]) -> None:
        """Fold numbers into the digest. No strings: their hashes differ from process to process."""
        self.digest = hash((self.digest, numbers))

    def note(self, text: str) -> None:
        """One line, under the step it happened in. Callers ask `tracing` first where making the text costs work."""
        if self.tracing:
            self.lines.append(f"{self.step:5}  {text}")

    def tail(self, count: int = TAIL) -> str:
        """The last lines."""
        return "\n".join(list(self.lines)[-count:])


class Hits:
    """How often each kind of thing happened, over one run or over many: a fault that is never hit proves nothing."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def __call__(self, name: str) -> None:
        self.counts[name] += 1

    def table(self) -> str:
        """Two columns, the rarest first."""
        return "\n".join(f"{count:>10,}  {name}" for name, count in sorted(self.counts.items(), key=lambda i: i[::-1]))
