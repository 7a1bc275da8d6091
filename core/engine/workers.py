"""Threads for what would hold up the loop, and what becomes of that when the engine stops."""

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
        """What `function(*args)` gives, called in one of the threads when it is the turn of `caller`; see `FairLine`.

        Raises Draining once `close` was called, and what `off_loop` does.
        """
        if not self._closed.is_set():
            await self._line.enter(caller, long=long)
        # Also where `close` came after this turn was given and before its task ran: the pool takes no work any more.
        if self._closed.is_set():
            raise Draining("the server is shutting down")
        work = off_loop(self._pool, function, *args)
        # A caller that leaves does not take its work out of the thread.
        work.add_done_callback(lambda _: self._line.leave(long=long))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            # `close` cancels what still waits for a thread. The caller was not cancelled and must not look as if.
            if self._closed.is_set() and task is not None and not task.cancelling():
                raise Draining("the server is shutting down") from None
            raise

    def close(self) -> None:
        """End the threads without waiting for work that has not begun. Idempotent."""
        self._closed.set()
        self._line.fail(Draining("the server is shutting down"))
        self._pool.shutdown(wait=False, cancel_futures=True)
