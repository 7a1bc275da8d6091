"""Work that its waiter has left is known at the end of a process, which then does not wait for its threads."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from service.engine.builder import in_daemon_thread, left_behind
from tests.support.until import eventually


async def test_work_that_goes_on_without_its_waiter_is_left_behind() -> None:
    assert not left_behind()
    begun, end = threading.Event(), threading.Event()

    def download() -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(begun.set)
            pool.submit(end.wait)

    waiting = asyncio.create_task(in_daemon_thread(download))
    await asyncio.to_thread(begun.wait)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    try:
        assert left_behind()
    finally:
        end.set()
    eventually(lambda: not left_behind())
