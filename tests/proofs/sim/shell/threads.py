"""What the shell asks of the operating system, made up: worker threads, a thread to stop, a descriptor to wake by.

Each is another place from which news comes to the loop, at an instant and in an order that the seed draws.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from tests.proofs.sim.shell.loop import VirtualLoop

SLOWEST = 0.02
"""Seconds that a piece of work in a pool takes at most, unless it is one of the slow ones."""

SLOW_SHARE, VERY_SLOW = 0.05, 1.0

TAKEN_UP = 0.004
"""Seconds until a thread that is free takes up what it was handed, at most: it waits for the interpreter lock."""


class Pool:
    """A `ThreadPoolExecutor` of so many threads: first come, first served, and what has begun cannot be cancelled."""

    def __init__(self, loop: VirtualLoop, rng: Any, workers: int) -> None:
        self._loop, self._rng, self._workers = loop, rng, workers
        self._queue: deque[tuple[asyncio.Future[Any], Callable[..., Any], tuple[Any, ...]]] = deque()
        self._busy = 0
        self._closed = False

    def __len__(self) -> int:
        return len(self._queue) + self._busy

    def hand_over(self, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """As `run_in_executor` with this pool."""
        if self._closed:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future = self._loop.create_future()
        self._queue.append((future, func, args))
        self._loop.call_later(self._loop.delay(TAKEN_UP), self._begin)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """What waits is cancelled, as a concurrent future is, and its asyncio future hears of it a little later."""
        assert not wait, "nothing on a loop may wait for a thread"
        self._closed = True
        while cancel_futures and self._queue:
            self._loop.call_soon_threadsafe(self._queue.popleft()[0].cancel)

    def _begin(self) -> None:
        while self._queue and self._busy < self._workers:
            future, func, args = self._queue.popleft()
            if future.cancelled():
                continue
            self._busy += 1
            slow = self._rng.random() < SLOW_SHARE
            self._loop.call_later(self._loop.delay(VERY_SLOW if slow else SLOWEST), self._end, future, func, args)

    def _end(self, future: asyncio.Future[Any], func: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._busy -= 1
        self._begin()
        try:
            result = func(*args)
        except Exception as error:
            if not future.done():
                future.set_exception(error)
            return
        if not future.done():
            future.set_result(result)


class Thread:
    """A `threading.Thread` whose whole work is done at once, some time after its start."""

    def __init__(self, *, target: Callable[[], None], name: str, daemon: bool) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self._loop, self._target = loop, target

    def start(self) -> None:
        """Begin."""
        self._loop.call_later(self._loop.delay(0.05), self._target)


class Threading:
    """In place of the module `threading` where a thread is started."""

    Thread = Thread


class Descriptors:
    """In place of the module `os` where a thread wakes the loop: counters that can be read, level-triggered."""

    EFD_NONBLOCK = EFD_CLOEXEC = 0

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._counts: dict[int, int] = {}
        self._readers: dict[int, Callable[[], None]] = {}
        loop.add_reader = self._add_reader  # type: ignore[method-assign, assignment]
        loop.remove_reader = self._remove_reader  # type: ignore[method-assign]

    @property
    def open(self) -> int:
        """Descriptors that were not closed."""
        return len(self._counts)

    def eventfd(self, count: int, _flags: int) -> int:
        """See `os.eventfd`."""
        number = 1000 + len(self._counts)
        self._counts[number] = count
        return number

    def eventfd_write(self, number: int, value: int) -> None:
        """See `os.eventfd_write`; the loop hears of it a little later."""
        if number not in self._counts:
            raise OSError("Bad file descriptor")
        self._counts[number] += value
        self._loop.call_later(self._loop.delay(0.002), self._look, number)

    def eventfd_read(self, number: int) -> int:
        """See `os.eventfd_read`."""
        count, self._counts[number] = self._counts[number], 0
        if not count:
            raise BlockingIOError("Resource temporarily unavailable")
        return count

    def close(self, number: int) -> None:
        """See `os.close`."""
        del self._counts[number]

    def _look(self, number: int) -> None:
        if self._counts.get(number) and number in self._readers:
            self._readers[number]()

    def _add_reader(self, number: int, callback: Callable[[], None]) -> None:
        self._readers[number] = callback

    def _remove_reader(self, number: int) -> bool:
        return self._readers.pop(number, None) is not None
