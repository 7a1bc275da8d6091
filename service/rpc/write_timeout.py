"""Bounds every write of one stream in time, with one timer per stream instead of one per token.

A client that announces a zero flow-control window blocks a write for ever, with no error; without a bound it would hold
a batch slot and KV pages. `asyncio.timeout` around each write costs 4 µs, as much as encoding and scheduling the token;
here a write costs two attribute stores and a look at the clock.
"""

from __future__ import annotations

import asyncio
from types import TracebackType

from core.errors import SlowConsumer

STALL_SECONDS = 1.0
"""A timer so many seconds late means that this process did not run; it then read no acknowledgements either."""


class WriteBound:
    """`async with WriteBound(seconds) as bound:` then `bound.begin()`, the write, `bound.end()`, any number of times.

    A write that takes `seconds` or more is cancelled and the block raises SlowConsumer. The cancelled write may still
    reach the client, so nothing may be written on that call afterwards.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._timeout = asyncio.timeout(None)
        self._timer: asyncio.TimerHandle | None = None
        self._look_due = self._loop.time() + seconds
        # Loop time at which the pending write began; None while no write is pending.
        self._since: float | None = None

    async def __aenter__(self) -> WriteBound:
        await self._timeout.__aenter__()
        self._look_due = self._loop.time() + self._seconds
        self._timer = self._loop.call_at(self._look_due, self._look)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._timer is not None, "entered"
        self._timer.cancel()
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError:
            raise SlowConsumer("the client does not read its stream fast enough") from None

    def begin(self) -> None:
        """A write starts now."""
        self._since = self._loop.time()

    def end(self) -> None:
        """The write is done."""
        self._since = None

    def _look(self) -> None:
        """Cut off the pending write if it is overdue; otherwise look again when it, or the next one, could be."""
        now = self._loop.time()
        # This process stood still, not the client: the write gets its whole time again.
        if self._since is not None and now - self._look_due > STALL_SECONDS:
            self._since = now
        due = (now if self._since is None else self._since) + self._seconds
        if due <= now:
            self._timeout.reschedule(now)
        else:
            self._look_due = due
            self._timer = self._loop.call_at(due, self._look)
