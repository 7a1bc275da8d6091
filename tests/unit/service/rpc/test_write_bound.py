"""The bound on writes: cuts the pending one, spares the rest, and is not taken for a cancellation or the reverse."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from core.errors import SlowConsumer
from service.rpc.write_timeout import WriteBound
from tests.support.within import within

pytestmark = pytest.mark.alone


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


class StoppedLoop:
    """The running loop with a clock that a test moves on, as it is across SIGSTOP."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.jumped = 0.0

    def time(self) -> float:
        return self._loop.time() + self.jumped

    def call_at(self, due: float, function: Callable[[], None]) -> asyncio.TimerHandle:
        return self._loop.call_at(due - self.jumped, function)


async def test_a_process_that_was_stopped_does_not_cut_its_clients() -> None:
    stopped, looks = StoppedLoop(), list[float]()

    class Watched(WriteBound):
        def _look(self) -> None:
            looks.append(self._loop.time())
            super()._look()

    async def cut(*, acknowledged: bool) -> None:
        bound = Watched(0.05)
        bound._loop = stopped  # type: ignore[assignment]
        # It jumps to the loop's own time, by which the timeout of the block goes.
        stopped.jumped = -100.0
        async with bound:
            bound.begin()
            stopped.jumped = 0.0
            while acknowledged and not looks:
                await asyncio.sleep(0.001)
            if not acknowledged:
                await forever()
            bound.end()

    await cut(acknowledged=True)
    with pytest.raises(SlowConsumer):
        await cut(acknowledged=False)
    assert len(looks) >= 3, "a client that does not read is cut all the same, one period later"
