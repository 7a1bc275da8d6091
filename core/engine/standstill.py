"""Whether the scheduler plans steps, by the reasons there are not to, and when nothing is in flight any more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum

from core.errors import SlipstreamError
from core.scheduler.scheduler import Scheduler


class Hold(Enum):
    """Why no step is planned. A reason is there or not: two pauses are one."""

    PAUSE = "pause"
    UPDATE = "update"
    SLEEP = "sleep"


class Standstill:
    """Holds the scheduler while there is a reason to. Loop thread only.

    The loop that steps the scheduler calls `look` after each step. `wake` has it step soon.
    """

    def __init__(self, scheduler: Scheduler, wake: Callable[[], None]) -> None:
        self._scheduler, self._wake = scheduler, wake
        self.holds: set[Hold] = set()
        self._waiting: list[asyncio.Future[None]] = []
        self._closed: SlipstreamError | None = None

    def hold(self, why: Hold) -> None:
        """Have no step planned from now on."""
        self.holds.add(why)
        self._scheduler.held = True

    def release(self, why: Hold) -> bool:
        """Plan steps again unless there are other reasons not to; returns whether this was one."""
        was_held = why in self.holds
        self.holds.discard(why)
        self._scheduler.held = bool(self.holds)
        self._wake()
        return was_held

    @contextmanager
    def held(self, why: Hold) -> Iterator[None]:
        """Hold while the block runs."""
        self.hold(why)
        try:
            yield
        finally:
            self.release(why)

    async def reached(self) -> None:
        """Return once no step and no copy is in flight, which it stays while anything holds.

        Raises what `close` was called with.
        """
        if self._closed is not None:
            raise self._closed
        if self._scheduler.is_still:
            return
        waits = asyncio.get_running_loop().create_future()
        self._waiting.append(waits)
        self._wake()
        try:
            await waits
        finally:
            self._waiting.remove(waits)

    def look(self) -> None:
        """Tell those that wait, if nothing is in flight."""
        if self._waiting and self._scheduler.is_still:
            for waits in self._waiting:
                if not waits.done():
                    waits.set_result(None)

    def close(self, error: SlipstreamError) -> None:
        """End every wait with `error`, those to come too. Idempotent."""
        self._closed = self._closed or error
        for waits in self._waiting:
            if not waits.done():
                waits.set_exception(self._closed)
