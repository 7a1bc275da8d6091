"""The order in which waiting requests are admitted, and the running request that gives way when pages run out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from core.types.request import Req

LPM_WINDOW = 64
"""How many of the oldest waiting requests `lpm` compares; bounds the matching work of one admission."""
LPM_PATIENCE = 32
"""A request that was passed over this many times goes first: cache hits must not starve the others."""


class Policy(Protocol):
    """`key` orders the queue; `choose` may take another than the head, from the first `window` requests."""

    window: int
    """How many requests from the head of the queue `choose` compares."""
    classes: bool
    """Whether `Req.priority` divides requests into classes; a lower value is a higher class."""

    def key(self, req: Req) -> tuple[int, int]:
        """Smaller is served earlier; unique per request."""
        ...

    def choose(self, head: Iterable[Req], match_len: Callable[[Req], int]) -> Req:
        """One of `head`, which is not empty and in key order. `match_len(req)`: its tokens that are cached."""
        ...


class FirstCome:
    """First come, first served."""

    window = 1
    classes = False

    def key(self, req: Req) -> tuple[int, int]:
        """Arrival order; a retracted request keeps its place."""
        return (0, req.sequence)

    def choose(self, head: Iterable[Req], match_len: Callable[[Req], int]) -> Req:
        """The head."""
        return next(iter(head))


class Priority(FirstCome):
    """Lower `priority` values first, arrival order among equals, as in vLLM."""

    classes = True

    def key(self, req: Req) -> tuple[int, int]:
        """Priority, then arrival."""
        return (req.priority, req.sequence)


class LongestPrefixMatch(FirstCome):
    """The longest cached prefix first, so that hot prefixes are used before they are evicted (SGLang's `lpm`)."""

    window = LPM_WINDOW

    def choose(self, head: Iterable[Req], match_len: Callable[[Req], int]) -> Req:
        """The longest match among `head`, ties by arrival. Before all go those that ran out of patience, by arrival."""

        def rank(req: Req) -> tuple[bool, int, int]:
            patient = req.passed_over < LPM_PATIENCE
            return patient, -match_len(req) if patient else 0, req.sequence

        return min(head, key=rank)


POLICIES: dict[str, Callable[[], Policy]] = {"fcfs": FirstCome, "lpm": LongestPrefixMatch, "priority": Priority}
"""By the name in `SchedulerConfig.policy`."""


def victim(running: list[Req], policy: Policy) -> Req:
    """The request that gives way: the one that `policy` would serve last.

    Of two or more the first in line is never taken, so some request always comes to its end.
    """
    return max(running, key=policy.key)
