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
    """Work in a pool was ended by what is no Exception, its cause: a panic of native code (pyo3), SystemExit."""


def off_loop(pool: Executor, function: Callable[..., T], *args: object) -> asyncio.Future[T]:
    """The result of `function(*args)`, run in `pool`. Raises what it raises, and WorkBroken for what is no Exception.

    A panic would pass every `except Exception` of a call, which then never gets a status and waits for ever; SystemExit
    would end the event loop, and a CancelledError would be taken for the caller's own.
    """
    return asyncio.get_running_loop().run_in_executor(pool, guarded, function, *args)


async def in_daemon_thread(function: Callable[[], None], name: str) -> None:
    """Wait until `function` has ended, or raised, in a thread that does not outlive the process; a pool's would."""
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
    """What `function` gives, or raises; WorkBroken for what is no Exception."""
    try:
        return function(*args)
    except Exception:
        raise
    except BaseException as error:
        broken = WorkBroken(f"{type(error).__name__} in a thread of the pool")
        # Its place is that of the panic, which is all that is logged of it where its message may quote a client.
        raise broken.with_traceback(error.__traceback__) from error
