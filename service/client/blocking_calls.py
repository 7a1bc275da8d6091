"""The calls of one blocking client: what waits for them, and how they end with the client."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from concurrent.futures import CancelledError
from typing import Any, Final, Generic, TypeVar

import grpc
import grpc.aio

from service.client.errors import CallFailed
from service.client.loop_thread import LoopEnded, LoopThread

T = TypeVar("T")

_END: Final = object()
CLOSED: Final = "the client is closed"


class BlockingCalls:
    """Makes calls on the thread that blocking clients share; any number of threads may wait for them."""

    def __init__(self) -> None:
        self._thread = LoopThread.acquire()
        self._closing = threading.Lock()
        self._closed = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._readers: set[_Reader[Any]] = set()

    def check(self) -> None:
        """Raises ValueError once the client is closed."""
        if self._closed:
            raise ValueError(CLOSED)

    def run(self, call: Callable[[], Awaitable[T]]) -> T:
        """The result of `call`, which is made on the thread, or its exception. An interrupt of the caller cancels it.

        Raises CallFailed (CANCELLED) if the client is closed meanwhile, ValueError if it was before, and RuntimeError
        on the thread itself, as in a callback of the client: it would wait for itself for ever.
        """
        self.check()
        try:
            return self._thread.run(self._live(call))
        except LoopEnded:
            raise ValueError(CLOSED) from None
        except CancelledError:
            if not self._closed:
                raise
        nothing = grpc.aio.Metadata()
        raise CallFailed(grpc.aio.AioRpcError(grpc.StatusCode.CANCELLED, nothing, nothing, "the client was closed"))

    def iterate(self, events: AsyncGenerator[T, None]) -> Generator[T, None, None]:
        """What `events` brings, one after the other; errors are those of `run`. Leaving early waits until it ends."""
        reader = _Reader(events)
        self._readers.add(reader)
        try:
            while (event := self.run(reader.next)) is not _END:
                yield event  # type: ignore[misc]  # only _END is no T
        finally:
            self._leave(reader)
            self._readers.discard(reader)

    def close(self, last: Callable[[], Awaitable[None]] | None = None) -> None:
        """Cancel all calls, wait until they have ended, and then for `last`. A second call does nothing.

        Raises RuntimeError on the thread itself, without an effect. In a child of a fork there is nothing to close.
        """
        if self._thread.is_parents:
            return
        self._thread.check()
        with self._closing:
            if self._closed:
                return
            self._closed = True
        try:
            self._thread.run(self._end(last))
        finally:
            self._thread.release()

    async def _live(self, call: Callable[[], Awaitable[T]]) -> T:
        # Behind the client's end nothing would cancel it.
        self.check()
        task = asyncio.current_task()
        assert task is not None, "on the loop"
        self._tasks.add(task)
        try:
            return await call()
        finally:
            self._tasks.discard(task)

    async def _end(self, last: Callable[[], Awaitable[None]] | None) -> None:
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for reader in self._readers.copy():
            await reader.close()
        if last is not None:
            await last()

    def _leave(self, reader: _Reader[Any]) -> None:
        if self._thread.is_parents:
            return
        if self._thread.is_current:
            # An iterator that was left to the garbage collector, which ran on this thread.
            reader.left = self._thread.begin(reader.close())
            return
        try:
            self._thread.run(reader.close())
        except (LoopEnded, CancelledError):
            """The thread has ended, and whatever ran on it."""


class _Reader(Generic[T]):
    """One reader of an asynchronous generator: a read that was interrupted has ended before the generator is closed."""

    def __init__(self, events: AsyncGenerator[T, None]) -> None:
        self._events = events
        self._read: asyncio.Task[Any] | None = None
        self._closing = asyncio.Lock()
        self.left: asyncio.Task[None] | None = None
        """Closes it, where nothing waits for that."""

    async def next(self) -> T | object:
        self._read = asyncio.current_task()
        return await anext(self._events, _END)

    async def close(self) -> None:
        """Idempotent, for several callers."""
        async with self._closing:
            if self._read is not None and not self._read.done():
                # The caller was interrupted, and the read is cancelled.
                await asyncio.wait([self._read])
            await self._events.aclose()
