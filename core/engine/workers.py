"""Threads for work that would hold up the event loop, and what becomes of that work when the engine stops."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from core.engine.fair_line import FairLine
from core.engine.off_loop import off_loop
from core.errors import Draining

T = TypeVar("T")


class Workers:
    """A bounded number of threads, shared fairly between callers. Event-loop thread only."""

    def __init__(self, threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._line = FairLine(threads)
        self._closed = threading.Event()

    async def run(self, function: Callable[..., T], *args: object, caller: str = "", long: bool = False) -> T:
        """The result of `function(*args)`, called in one of the threads when it is the turn of `caller`.

        Callers take turns in rotation. Work that is `long` leaves a thread to other work, if there are two. Raises
        Draining once `close` was called, what `function` raises, and WorkBroken in place of what is no Exception.
        """
        if not self._closed.is_set():
            await self._line.enter(caller, long=long)
        # Looked at again: `close` may have come after the turn was given, and then the pool takes no work any more.
        if self._closed.is_set():
            raise Draining("the server is shutting down")
        work = off_loop(self._pool, function, *args)
        # The turn ends with the work: a caller that is cancelled leaves its work in the thread.
        work.add_done_callback(lambda _: self._line.leave(long=long))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            # `close` cancels work that still waits for a thread. Its caller was not cancelled, so it must not seem so.
            if self._closed.is_set() and task is not None and not task.cancelling():
                raise Draining("the server is shutting down") from None
            raise

    def close(self) -> None:
        """Refuse further work, cancel what has not begun, and let the threads end. Waits for nothing. Idempotent."""
        self._closed.set()
        self._line.fail(Draining("the server is shutting down"))
        self._pool.shutdown(wait=False, cancel_futures=True)
