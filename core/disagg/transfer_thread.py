"""A thread with an event loop of its own, on which keys are sent and received beside the engine's loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class TransferThread:
    """Runs coroutines that move bytes. The engine's loop, which puts out tokens, never waits for one of them."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._begun: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self._closed = False

    def call(self, function: Callable[..., Any], *args: Any) -> None:
        """Call `function(*args)` on this thread soon; in the order of these calls. Nothing once closed."""
        if not self._closed:
            self.loop.call_soon_threadsafe(function, *args)

    def begin(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run `work()` on this thread; it ends by itself, or is cancelled by `close`."""

        def start() -> None:
            task = self.loop.create_task(work())
            self._begun.add(task)
            task.add_done_callback(self._begun.discard)

        self.call(start)

    async def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of `work()`, which runs on this thread. If cancelled, `work` has ended when this raises.

        Raises what `work` raises, and CancelledError if the thread is closed meanwhile.
        """
        home = asyncio.get_running_loop()
        done: asyncio.Future[T] = home.create_future()
        task: asyncio.Task[T] | None = None

        def tell(ended: asyncio.Task[T]) -> None:
            home.call_soon_threadsafe(_settle, done, ended)

        def begin() -> None:
            nonlocal task
            task = self.loop.create_task(work())
            task.add_done_callback(tell)

        if self._closed:
            raise asyncio.CancelledError
        self.call(begin)
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            # Ordered behind `begin`, so there is a task.
            self.call(lambda: task and task.cancel())
            while not done.done():
                try:
                    await asyncio.wait((done,))
                except asyncio.CancelledError:
                    continue
            if not done.cancelled():
                done.exception()
            raise

    def close(self) -> None:
        """Cancel all that runs, and end the thread. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            # Again for those whose call came behind the end.
            while left := asyncio.all_tasks(self.loop):
                for task in left:
                    task.cancel()
                self.loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self.loop.run_until_complete(self.loop.shutdown_default_executor())
            self.loop.close()


def _settle(done: asyncio.Future[T], ended: asyncio.Task[T]) -> None:
    if done.done():
        return
    if ended.cancelled():
        done.cancel()
    elif (error := ended.exception()) is not None:
        done.set_exception(error)
    else:
        done.set_result(ended.result())
