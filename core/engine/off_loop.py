"""Runs blocking work on other threads, for coroutines of the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

T = TypeVar("T")


class WorkBroken(Exception):
    """A BaseException that is no Exception ended work in a pool: a panic of native code (pyo3), SystemExit.

    It is the cause of this one.
    """


def off_loop(pool: Executor, function: Callable[..., T], *args: object) -> asyncio.Future[T]:
    """A future for the result of `function(*args)`, run in `pool`.

    It raises what `function` raises, but WorkBroken in place of what is no Exception, and RuntimeError in place of
    StopIteration.
    A panic would pass every `except Exception` of a call, which would then never get a status and wait for ever.
    SystemExit would end the event loop, and a CancelledError would be taken for the caller's own.
    """
    return asyncio.get_running_loop().run_in_executor(pool, guarded, function, *args)


async def in_daemon_thread(function: Callable[[], None], name: str) -> None:
    """Run `function` in a daemon thread and wait until it has returned or raised.

    The process can exit while the thread hangs, which a thread of a pool would prevent.
    """
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def run() -> None:
        try:
            function()
        finally:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nothing waits any more
                loop.call_soon_threadsafe(done.set)

    threading.Thread(target=run, name=name, daemon=True).start()
    await done.wait()


def guarded(function: Callable[..., T], *args: object) -> T:
    """Call `function`. Raises as `off_loop` says."""
    try:
        return function(*args)
    except StopIteration as error:
        # No future takes it: whoever waits would wait for ever.
        raise RuntimeError("StopIteration in a thread of the pool").with_traceback(error.__traceback__) from None
    except Exception:
        raise
    except BaseException as error:
        broken = WorkBroken(f"{type(error).__name__} in a thread of the pool")
        # With the panic's traceback: where its message may quote a client, only the place is logged.
        raise broken.with_traceback(error.__traceback__) from error
