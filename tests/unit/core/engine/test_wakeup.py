"""The flag that the engine's loop task waits for: never lost, never left over, and never in the way of other tasks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from core.engine.wakeup import Wakeup
from tests.support.until import turns
from tests.support.within import within


@pytest_asyncio.fixture
async def wakeup() -> AsyncIterator[Wakeup]:
    made = Wakeup()
    yield made
    made.close()
    made.close()


async def test_a_wake_up_before_the_wait_is_not_lost_and_serves_one_wait(wakeup: Wakeup) -> None:
    wakeup.set()
    wakeup.set()
    async with within(10, "the flag was set"):
        await wakeup.wait()
    waiting = asyncio.create_task(wakeup.wait())
    await turns(3)
    assert not waiting.done(), "the loop task would spin"
    wakeup.set()
    async with within(10, "it was set again"):
        await waiting


async def test_others_run_before_a_wait_returns_however_often_it_is_set(wakeup: Wakeup) -> None:
    ran: list[int] = []
    for number in range(3):
        wakeup.set()
        asyncio.get_running_loop().call_soon(ran.append, number)
        await wakeup.wait()
        assert ran[-1:] == [number]


@pytest.mark.parametrize("eventfd", [True, False])
async def test_another_thread_wakes_it(wakeup: Wakeup, eventfd: bool) -> None:
    if not eventfd:
        # As where the system has none.
        wakeup.close()
    waiting = asyncio.create_task(wakeup.wait())
    await turns(3)
    assert not waiting.done()
    thread = threading.Thread(target=wakeup.set_threadsafe)
    thread.start()
    async with within(10, "another thread set the flag"):
        await waiting
    thread.join()


async def test_a_wait_ends_at_its_time_and_an_earlier_one_leaves_no_alarm_behind(wakeup: Wakeup) -> None:
    loop = asyncio.get_running_loop()
    until = loop.time() + 0.02
    first = asyncio.create_task(wakeup.wait(until))
    await turns(3)
    wakeup.set()
    await first
    second = asyncio.create_task(wakeup.wait())
    passed = loop.create_future()
    loop.call_at(until + 0.001, passed.set_result, None)
    await passed
    await turns(3)
    assert not second.done(), "the first one was over before its time"
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    async with within(10, "its time has come"):
        await wakeup.wait(loop.time() + 0.001)
