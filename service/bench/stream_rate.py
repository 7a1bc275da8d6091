"""How fast many streams deliver while all of them run, and what one stream at a time costs in latency."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

EDGE = 0.1
"""Share of the tokens at either end that a rate leaves out."""

Stream = Callable[[], AsyncIterator[int]]
"""Opens one stream; it yields the number of tokens of each delta that brings any."""


@dataclass(frozen=True, slots=True)
class Rate:
    """The rate of all streams together, while all of them run, without the first and the last tenth of the tokens."""

    tokens_per_second: float
    messages_per_second: float


@dataclass(slots=True)
class Latencies:
    """Seconds: `first` from a request to its first delta, `gaps` from delta to delta of one stream."""

    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    def extend(self, others: Latencies) -> None:
        """Add `others` to these."""
        self.first.extend(others.first)
        self.gaps.extend(others.gaps)


class _Arrivals:
    """The number of tokens of every delta of all streams, with the time at which it came."""

    def __init__(self) -> None:
        self._seen: list[tuple[float, int]] = []
        self.all_open, self.first_end = 0.0, math.inf

    def add(self, tokens: int) -> None:
        self._seen.append((time.perf_counter(), tokens))

    def rate(self) -> Rate:
        total = sum(tokens for _, tokens in self._seen)
        inner, passed = [], 0
        for at, tokens in self._seen:
            passed += tokens
            if EDGE * total <= passed <= (1 - EDGE) * total and self.all_open <= at <= self.first_end:
                inner.append((at, tokens))
        elapsed = inner[-1][0] - inner[0][0] if inner else 0.0
        if elapsed <= 0:
            raise ValueError("too few tokens to tell a rate: ask for more")
        # Without the first delta, whose arrival begins the time.
        return Rate(sum(tokens for _, tokens in inner[1:]) / elapsed, (len(inner) - 1) / elapsed)


async def measure_rate(open_stream: Stream, streams: int, tokens: int) -> Rate:
    """Read `streams` streams at once.

    Raises ValueError if a stream does not bring `tokens` tokens, or if all bring too few for a rate.
    """
    arrivals = _Arrivals()

    async def read() -> None:
        got = 0
        async for count in open_stream():
            if not got:
                arrivals.all_open = time.perf_counter()
            got += count
            arrivals.add(count)
        arrivals.first_end = min(arrivals.first_end, time.perf_counter())
        if got != tokens:
            raise ValueError(f"a stream brought {got} of {tokens} tokens")

    await asyncio.gather(*(read() for _ in range(streams)))
    return arrivals.rate()


async def measure_latencies(open_stream: Stream, requests: int) -> Latencies:
    """Read `requests` streams, one after the other."""
    seen = Latencies()
    for _ in range(requests):
        last, first = time.perf_counter(), True
        async for _count in open_stream():
            now = time.perf_counter()
            (seen.first if first else seen.gaps).append(now - last)
            last, first = now, False
    return seen
