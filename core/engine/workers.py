"""Threads for what would hold up the loop, and what becomes of that when the engine stops."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from core.engine.off_loop import off_loop
from core.errors import Draining

T = TypeVar("T")


class Workers:
    """A bounded number of threads. Event-loop thread only."""

    def __init__(self, threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._closed = threading.Event()

    async def run(self, function: Callable[..., T], *args: object) -> T:
        """What `function(*args)` gives, called in one of the threads. Raises Draining once `close` was called, and what
        `off_loop` does.
        """
        if self._closed.is_set():
            raise Draining("the server is shutting down")
        try:
            return await off_loop(self._pool, function, *args)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            # `close` cancels what still waits for a thread. The caller was not cancelled and must not look as if.
            if self._closed.is_set() and task is not None and not task.cancelling():
                raise Draining("the server is shutting down") from None
            raise

    def close(self) -> None:
        """End the threads without waiting for work that has not begun. Idempotent."""
        self._closed.set()
        self._pool.shutdown(wait=False, cancel_futures=True)
