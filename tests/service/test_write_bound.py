"""The bound on writes: cuts the pending one, spares the rest, and is not taken for a cancellation or the reverse."""

from __future__ import annotations

import asyncio

import pytest

from core.errors import SlowConsumer
from service.write_bound import WriteBound
from tests.fakes.within import within


async def forever() -> None:
    await asyncio.Event().wait()


async def test_a_write_that_hangs_is_cut() -> None:
    with pytest.raises(SlowConsumer):
        async with within(5, "the write is cut"), WriteBound(0.05) as bound:
            bound.begin()
            await forever()


async def test_the_bound_is_per_write_and_not_for_the_whole_stream() -> None:
    loop = asyncio.get_running_loop()
    async with WriteBound(0.05) as bound:
        end = loop.time() + 0.2
        while loop.time() < end:
            bound.begin()
            await asyncio.sleep(0.01)
            bound.end()


async def test_waiting_for_tokens_is_not_bounded() -> None:
    async with WriteBound(0.02) as bound:
        bound.begin()
        bound.end()
        await asyncio.sleep(0.1)


async def test_it_fires_between_one_and_two_periods_never_later() -> None:
    loop = asyncio.get_running_loop()
    started = 0.0
    with pytest.raises(SlowConsumer):
        async with WriteBound(0.1) as bound:
            await asyncio.sleep(0.05)
            started = loop.time()
            bound.begin()
            await forever()
    assert 0.09 < loop.time() - started < 0.2


async def test_a_cancellation_from_outside_stays_one() -> None:
    entered = asyncio.Event()

    async def body() -> None:
        async with WriteBound(5.0) as bound:
            bound.begin()
            entered.set()
            await forever()

    task = asyncio.create_task(body())
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_errors_of_the_body_pass_a_timeout_included() -> None:
    with pytest.raises(TimeoutError):
        async with WriteBound(5.0):
            raise TimeoutError
