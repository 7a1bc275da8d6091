"""Lets the readers of streams run a few at a time, so that the engine's own turn never stands behind all of them.

A reader writes to its client, and that costs more than what the engine does for its token. The event loop runs what is
ready in order: a step that wakes 256 readers would make the next step wait for 256 writes, however late the device is.
So a pass of the loop has `WIDTH` readings, and whoever comes later stands in line for the next pass. The engine does
not stand in that line and gets a turn in every pass; what it makes meanwhile for a stream in the line is merged. While
there is time for everyone, the line only spreads the readers over a few passes of some 10 µs.
"""

from __future__ import annotations

import asyncio
from collections import deque

WIDTH = 16
"""Readings in one pass of the loop: of 20 to 40 µs each where every one ends in a write of a message."""


class Turnstile:
    """One for all streams of an engine. Event-loop thread only."""

    def __init__(self, width: int = WIDTH) -> None:
        self._width = width
        self._passed = 0
        self._line: deque[asyncio.Future[None]] = deque()
        self._turning = False

    def __len__(self) -> int:
        return len(self._line)

    def enter(self) -> bool:
        """Whether the caller may read now; if not, it has to `admit` a future and wait for it."""
        # While anyone is in line the pass is full: `_turn` fills it from there first.
        if self._passed >= self._width:
            return False
        self._pass()
        return True

    def admit(self, waiter: asyncio.Future[None]) -> None:
        """Resolve `waiter` when it is its turn, at once if there is room. Its reader need not `enter` again."""
        if waiter.done():
            return
        if self.enter():
            waiter.set_result(None)
        else:
            self._line.append(waiter)

    def _pass(self) -> None:
        self._passed += 1
        if not self._turning:
            self._turning = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        """The next pass of the loop: as many as fit, those who gave up left out."""
        self._turning = False
        self._passed = 0
        while self._line and self._passed < self._width:
            waiter = self._line.popleft()
            if not waiter.done():
                self._pass()
                waiter.set_result(None)
