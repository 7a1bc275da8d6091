"""One thread with an event loop, on which the blocking clients of a process make their calls."""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, ClassVar, Final, Generic, TypeVar

T = TypeVar("T")

NOTICED_AFTER: Final = 0.5
"""Seconds after which an interrupt is noticed that came at the wrong moment."""


class LoopEnded(Exception):
    """The thread has ended, so that nothing runs on it any more."""


class LoopThread:
    """A thread that runs an event loop until `release` was called as often as `acquire`.

    gRPC's asyncio half has one poller for all loops of a process, and loops in several threads wake each other for
    nothing; so all blocking clients share one thread. Its loop outlives it, for the next one: gRPC still has events of
    calls that were cancelled, and complains on the terminal where it finds their loop closed.
    """

    _shared: ClassVar[LoopThread | None] = None
    _spares: ClassVar[list[tuple[int, asyncio.AbstractEventLoop]]] = []
    """Loops of threads that have ended, each with its process."""
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._users = 0
        self._pid = os.getpid()
        self._loop = loop
        self._ended = threading.Event()
        self._waited_for: set[Future[Any]] = set()
        # A program that ends without closing its client is not kept alive.
        self._thread = threading.Thread(target=self._work, name="slipstream-client", daemon=True)
        self._thread.start()

    @classmethod
    def acquire(cls) -> LoopThread:
        """The thread of this process, begun if it has none. A child of a fork gets one of its own."""
        with cls._lock:
            shared = cls._shared
            if shared is None or shared.is_parents:
                shared = cls._shared = LoopThread(cls._next_loop())
            shared._users += 1
            return shared

    @classmethod
    def _next_loop(cls) -> asyncio.AbstractEventLoop:
        while cls._spares:
            pid, loop = cls._spares.pop()
            if pid == os.getpid():
                return loop
        return asyncio.new_event_loop()

    @classmethod
    def close_spares(cls) -> None:
        """At the end of the process: close the loops that nothing runs on."""
        for pid, loop in cls._spares:
            if pid == os.getpid():
                loop.close()

    def release(self) -> None:
        """Give it back. The last user's call cancels what still runs, ends the thread, and waits for that."""
        with self._lock:
            self._users -= 1
            if self._users or self.is_parents:
                return
            LoopThread._shared = None
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._spares.append((self._pid, self._loop))

    @property
    def is_parents(self) -> bool:
        """Whether this process is a child of the one that has the thread."""
        return self._pid != os.getpid()

    @property
    def is_current(self) -> bool:
        """Whether the caller runs on it."""
        return threading.current_thread() is self._thread

    def check(self) -> None:
        """Raise RuntimeError where waiting for the thread would last for ever."""
        if self.is_current or self.is_parents:
            raise RuntimeError("a blocking client cannot be used in its own callbacks, nor behind a fork")

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Its result, or its exception. An interrupt of the caller, such as KeyboardInterrupt, cancels it.

        Raises concurrent.futures.CancelledError if it is cancelled on the thread, LoopEnded if that has ended, and
        RuntimeError on the thread itself and in a child of a fork.
        """
        call = _Call(work)
        try:
            self.check()
            if self._ended.is_set():
                raise LoopEnded
        except (RuntimeError, LoopEnded):
            call.close()
            raise
        try:
            return _result_of(self._sent(call.made))
        except BaseException:
            # An interrupt may come before there is a future to cancel.
            self._loop.call_soon_threadsafe(call.leave)
            raise

    def begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """On the thread itself: a task, which the caller has to hold."""
        return self._loop.create_task(work)

    def _sent(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        self._waited_for.add(future)
        future.add_done_callback(self._waited_for.discard)
        # Sent while the thread was about to end: whether it is seen there or here, nothing waits for it.
        if self._ended.is_set():
            future.cancel()
        return future

    def _work(self) -> None:
        self._loop.run_forever()
        try:
            while left := asyncio.all_tasks(self._loop):
                for task in left:
                    task.cancel()
                self._loop.run_until_complete(asyncio.wait(left))
        finally:
            self._ended.set()
            for future in self._waited_for.copy():
                future.cancel()


def _result_of(future: Future[T]) -> T:
    """Wait for it, in pieces: Python does not notice a signal that came right before a wait, until that is over."""
    while True:
        try:
            return future.result(NOTICED_AFTER)
        except TimeoutError:
            if future.done():
                # Its own.
                return future.result()


class _Call(Generic[T]):
    """A coroutine that is about to be sent to a loop."""

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self._work = work
        self._task: asyncio.Task[Any] | None = None
        self.made = self._make()

    async def _make(self) -> T:
        self._task = asyncio.current_task()
        return await self._work

    def leave(self) -> None:
        """On the loop: cancel it, or if it has not begun, see to it that it never does."""
        if self._task is None:
            self.close()
        else:
            self._task.cancel()

    def close(self) -> None:
        """Before it has begun. A task of it that is there already ends with its first step."""
        self.made.close()
        self._work.close()


atexit.register(LoopThread.close_spares)
