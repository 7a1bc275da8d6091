"""Wakes the engine's loop task, from the loop's thread or from another."""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Callable


def _writer() -> Callable[[int, int], object] | None:
    """`eventfd_write(fd, value)` without letting go of the interpreter. A descriptor like ours never makes it wait.

    None where the system has no eventfd.
    """
    try:
        found = ctypes.PyDLL(None).eventfd_write
    except (OSError, AttributeError):
        return getattr(os, "eventfd_write", None)
    found.argtypes = [ctypes.c_int, ctypes.c_uint64]
    return found


eventfd_write = _writer()


class Wakeup:
    """A flag with one waiter; setting it before the wait is not lost. Belongs to the running loop.

    Other threads set it through an eventfd where the system has one, else through `call_soon_threadsafe`.

    The forward thread keeps the interpreter while it writes there. `os.eventfd_write` lets go of it, and then it comes
    back only when the loop waits again, in the middle of a step. The loop's turn is where the step computes or waits.

    Measured coroutine -> thread -> coroutine: 21 µs through an eventfd, 26 µs through `call_soon_threadsafe`.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._set = False
        self._waiter: asyncio.Future[None] | None = None
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) if hasattr(os, "eventfd") else -1
        if self._fd >= 0:
            self._loop.add_reader(self._fd, self._readable)

    def set(self) -> None:
        """Wake the waiter; from the loop's own thread."""
        self._set = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def set_threadsafe(self) -> None:
        """Wake the waiter; from any thread."""
        if self._fd >= 0 and eventfd_write is not None:
            eventfd_write(self._fd, 1)
        else:
            self._loop.call_soon_threadsafe(self.set)

    async def wait(self, until: float | None = None) -> None:
        """Return once the flag is set, or at the loop time `until` (seconds), and clear it.

        Always lets other tasks run first, also when the flag is set already.
        """
        if self._set:
            await asyncio.sleep(0)
        else:
            self._waiter = self._loop.create_future()
            timer = self._loop.call_at(until, self.set) if until is not None else None
            try:
                await self._waiter
            finally:
                self._waiter = None
                if timer is not None:
                    timer.cancel()
        self._set = False

    def close(self) -> None:
        """Close the file descriptor. Idempotent; the threads that call `set_threadsafe` must have ended before."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _readable(self) -> None:
        os.eventfd_read(self._fd)
        self.set()
