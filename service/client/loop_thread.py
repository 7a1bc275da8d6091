"""One thread with an event loop, on which the blocking clients of a process make their calls."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, Coroutine, Generator
from typing import Any, ClassVar, Final, Generic, TypeVar

T = TypeVar("T")

_END: Final = object()


class LoopThread:
    """A thread that runs an event loop until `release` was called as often as `acquire`.

    gRPC's asyncio half has one poller for all loops of a process, and loops in several threads wake each other for
    nothing; so all blocking clients share one thread.
    """

    _shared: ClassVar[LoopThread | None] = None
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        self._users = 0
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        # A program that ends without closing its client is not kept alive.
        self._thread = threading.Thread(target=self._loop.run_forever, name="slipstream-client", daemon=True)
        self._thread.start()

    @classmethod
    def acquire(cls) -> LoopThread:
        """The thread of this process, begun if it has none. A child of a fork gets one of its own."""
        with cls._lock:
            shared = cls._shared
            if shared is None or shared._pid != os.getpid():
                shared = cls._shared = LoopThread()
            shared._users += 1
            return shared

    def release(self) -> None:
        """Give it back. The last user's call ends the thread, and waits for that."""
        with self._lock:
            self._users -= 1
            if self._users or self._pid != os.getpid():
                return
            LoopThread._shared = None
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Its result, or its exception. An interrupt of the caller, such as KeyboardInterrupt, cancels it.

        Raises RuntimeError on the thread itself, as in a callback of a client: it would wait for itself for ever.
        """
        if threading.current_thread() is self._thread or self._pid != os.getpid():
            work.close()
            raise RuntimeError("a blocking client cannot be used in its own callbacks, nor behind a fork")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def iterate(self, events: AsyncGenerator[T, None]) -> Generator[T, None, None]:
        """What `events` brings, one after the other. Leaving early closes it, and waits for that."""
        reader = _Reader(events)
        try:
            while (event := self.run(reader.next())) is not _END:
                yield event  # type: ignore[misc]  # only _END is no T
        finally:
            if threading.current_thread() is self._thread:
                # An iterator that was left to the garbage collector, which ran on this thread.
                reader.closing = self._loop.create_task(reader.close())
            else:
                self.run(reader.close())


class _Reader(Generic[T]):
    """One reader of an asynchronous generator: a read that was interrupted has ended before the generator is closed."""

    def __init__(self, events: AsyncGenerator[T, None]) -> None:
        self._events = events
        self._read: asyncio.Task[Any] | None = None
        self.closing: asyncio.Task[None] | None = None

    async def next(self) -> T | object:
        self._read = asyncio.current_task()
        return await anext(self._events, _END)

    async def close(self) -> None:
        if self._read is not None and not self._read.done():
            # An interrupt between the start of a call and the wait for it has cancelled nothing.
            self._read.cancel()
            await asyncio.wait([self._read])
        await self._events.aclose()
