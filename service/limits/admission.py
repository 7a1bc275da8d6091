"""How many calls may be open at once, and how many may start per second, with a bounded wait for both.

Waiting calls stand in one FIFO line (an `asyncio.Lock`), so only its head polls the throttler. `asyncio-throttle` alone
wakes every waiter a hundred times a second and serves them in no order. The line is bounded in length and in time. Past
either bound a call is refused with `Overloaded`, which carries the seconds after which to come back. Queue depth and
page budgets are the scheduler's business, not this file's.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from asyncio_throttle.throttler import Throttler

from core.errors import DeadlinePassed, Overloaded

CONCURRENCY_LIMIT = "CONCURRENCY_LIMIT"
RATE_LIMIT = "RATE_LIMIT"
POLL_SECONDS = 0.005
"""Seconds between two looks of the head of the line at the throttler."""

Told = Callable[[str, float], Overloaded]
"""Makes the error of a refusal from its reason, one of the two above, and the seconds after which to come back."""


class Admission:
    """Admits at most `max_concurrent` calls at once and `rate_limit` per second (None: any rate).

    A call that cannot start at once waits in line at most `max_wait` seconds. At most `max_waiters` calls wait. `told`
    makes the error of a refusal. Event-loop thread only.
    """

    def __init__(
        self,
        max_concurrent: float,
        rate_limit: float | None = None,
        max_wait: float = 1.0,
        max_waiters: int = 256,
        told: Told | None = None,
    ) -> None:
        self._slots = _Slots(max_concurrent)
        self._throttler = _throttler(rate_limit)
        self._rate = rate_limit
        self._told = told or _told
        self._max_wait = max_wait
        self._max_waiters = max_waiters
        self._line = asyncio.Lock()
        self._waiting = 0
        self._open = 0

    @property
    def open(self) -> int:
        """Calls admitted and not yet ended."""
        return self._open

    @property
    def waiting(self) -> int:
        """Calls in line, its head included."""
        return self._waiting

    def resize(self, max_concurrent: float, rate_limit: float | None) -> None:
        """Apply other limits from now on. Open calls go on, and count against the new limits."""
        self._slots.resize(max_concurrent)
        if rate_limit != self._rate:
            self._rate, self._throttler = rate_limit, _throttler(rate_limit)

    @asynccontextmanager
    async def slot(self, deadline: float | None = None) -> AsyncIterator[None]:
        """Hold one place while the body runs.

        `deadline` is a `time.monotonic()` instant. Raises Overloaded when the line is full or the wait longer than
        `max_wait`, and DeadlinePassed when the deadline comes first.
        """
        await self.enter(deadline)
        try:
            yield
        finally:
            self.leave()

    def refuse_hopeless(self) -> None:
        """Raise Overloaded if `enter` would refuse every call at once, because the line is full."""
        if self._waiting >= self._max_waiters:
            raise self._refusal()

    async def enter(self, deadline: float | None = None, places: int = 1) -> None:
        """Wait for `places` places and take them, where no `async with` block can hold them; `leave` gives them back.

        Raises Overloaded and DeadlinePassed, as `slot` does.
        """
        await self._enter(deadline, places)
        self._open += 1

    def leave(self, places: int = 1) -> None:
        """Give back the `places` that one `enter` took."""
        self._open -= 1
        self._slots.release(places)

    async def _enter(self, deadline: float | None, places: int) -> None:
        self.refuse_hopeless()
        left = math.inf if deadline is None else deadline - time.monotonic()
        if left <= 0:
            raise DeadlinePassed("the deadline passed before the request was admitted")
        self._waiting += 1
        try:
            async with asyncio.timeout(min(self._max_wait, left)):
                await self._pass_line(places)
        except TimeoutError:
            if left <= self._max_wait:
                raise DeadlinePassed("the deadline passed before the request was admitted") from None
            raise self._refusal() from None
        finally:
            self._waiting -= 1

    async def _pass_line(self, places: int) -> None:
        async with self._line:
            await self._slots.acquire(places)
            if self._throttler is None:
                return
            # After the slot, so that a call which waits for a slot in vain has used nothing of the rate.
            try:
                await self._throttler.acquire()  # type: ignore[no-untyped-call]
            except BaseException:
                self._slots.release(places)
                raise

    def _refusal(self) -> Overloaded:
        """The error for a call in a line that does not move: the limit it waits for, and when to come back."""
        if self._slots.locked() or self._rate is None:
            return self._told(CONCURRENCY_LIMIT, self._max_wait)
        return self._told(RATE_LIMIT, max(self._waiting, 1) / self._rate)


class _Slots:
    """A counter with a limit that can change. At most one task waits for it: the head of the line."""

    def __init__(self, limit: float) -> None:
        self._limit, self._taken = limit, 0
        self._room: asyncio.Future[None] | None = None

    def locked(self, wanted: int = 1) -> bool:
        """Whether there is no room for `wanted` more."""
        return self._taken + wanted > self._limit

    async def acquire(self, count: int) -> None:
        while self.locked(count):
            self._room = asyncio.get_running_loop().create_future()
            try:
                await self._room
            finally:
                self._room = None
        self._taken += count

    def release(self, count: int) -> None:
        self._taken -= count
        self._wake()

    def resize(self, limit: float) -> None:
        self._limit = limit
        self._wake()

    def _wake(self) -> None:
        if self._room is not None and not self._room.done():
            self._room.set_result(None)


def _told(reason: str, retry_after: float) -> Overloaded:
    words = {CONCURRENCY_LIMIT: "too many requests at once", RATE_LIMIT: "too many requests per second"}
    return Overloaded(words[reason], reason=reason, retry_after=retry_after)


def _throttler(rate_limit: float | None) -> Throttler | None:
    """A throttler of the same mean rate. It takes a whole number per period, so the period (s) holds the fraction."""
    if rate_limit is None:
        return None
    per_period = max(1, math.floor(rate_limit))
    return Throttler(rate_limit=per_period, period=per_period / rate_limit, retry_interval=POLL_SECONDS)
