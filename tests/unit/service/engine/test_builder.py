"""Work beside the event loop: its outcome comes to its waiter, and it keeps no process alive."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from service.engine.builder import in_daemon_thread
from tests.support.until import PATIENCE, until


async def test_a_process_that_stops_does_not_wait_for_what_is_loaded() -> None:
    """The thread must be a daemon, else Ctrl-C would take effect only once the weights are read."""
    assert await in_daemon_thread(lambda: threading.current_thread().daemon)


async def test_what_the_work_raises_is_raised_where_it_is_awaited() -> None:
    def work() -> None:
        raise SystemExit("a library gave up")

    with pytest.raises(SystemExit, match="a library gave up"):
        await in_daemon_thread(work)


@pytest.mark.parametrize("fails", [False, True])
async def test_a_result_that_comes_after_its_cancelled_waiter_disturbs_nothing(fails: bool) -> None:
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    begun, go, threads = threading.Event(), threading.Event(), list[threading.Thread]()

    def work() -> None:
        threads.append(threading.current_thread())
        begun.set()
        go.wait(PATIENCE)
        if fails:
            raise RuntimeError("the weights are bad")

    waiting = asyncio.create_task(in_daemon_thread(work))
    assert await asyncio.to_thread(begun.wait, PATIENCE)
    waiting.cancel()
    await asyncio.wait([waiting])
    go.set()
    await until(lambda: not threads[0].is_alive())
    await asyncio.sleep(0)
    assert told == []
