"""Lets the readers of streams run a few at a time, so that the engine's own turn never stands behind all of them.

A reader writes to its client, and that costs more than what the engine does for its token. The event loop runs what is
ready in order: a step that wakes 256 readers would make the next step wait for 256 writes, however late the device is.
So a pass of the loop has `WIDTH` readings, and a reader that comes later stands in line for the next pass. The engine
does not stand in that line and gets a turn in every pass. What it makes for a stream whose reader is in line is merged.
While there is time for all readers, the line only spreads them over a few passes of some 10 µs.
"""

from __future__ import annotations

import asyncio
from collections import deque

WIDTH = 16
"""Readings in one pass of the loop. One takes 20 to 40 µs where it ends in the write of a message."""


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
        """Take a turn if there is one now; returns whether. Without one, the reader must `admit` a future and wait."""
        # No reader in line is overtaken: while there is one, the pass is full, for `_turn` fills it from the line.
        if self._passed >= self._width:
            return False
        self._pass()
        return True

    def admit(self, waiter: asyncio.Future[None]) -> None:
        """Resolve `waiter` when it is its turn, at once if there is room. Its reader then has the turn: no `enter`."""
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
        """Begin the next pass: let in as many readers from the line as fit, and leave out those that gave up."""
        self._turning = False
        self._passed = 0
        while self._line and self._passed < self._width:
            waiter = self._line.popleft()
            if not waiter.done():
                self._pass()
                waiter.set_result(None)
