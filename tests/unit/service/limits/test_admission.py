"""The line in front of the engine: bounded in number and time, in order, and without leaks."""

from __future__ import annotations

import asyncio
import time

import pytest

from core.errors import DeadlinePassed, Overloaded
from service.client import CallFailed, SlipstreamClient
from service.limits.admission import Admission
from tests.support.fakes.fake_engine import FakeEngine, held
from tests.support.servers import ONCE, Serve
from tests.support.until import until


async def hold(admission: Admission, release: asyncio.Event, entered: list[int], number: int = 0) -> None:
    async with admission.slot():
        entered.append(number)
        await release.wait()


async def settle(admission: Admission, open_: int, waiting: int) -> None:
    """Let tasks run until the figures are reached."""
    await until(lambda: (admission.open, admission.waiting) == (open_, waiting))


async def test_at_most_so_many_at_once_and_the_next_enters_when_one_leaves() -> None:
    admission, release, entered = Admission(2, max_wait=5), asyncio.Event(), []
    tasks = [asyncio.create_task(hold(admission, release, entered, n)) for n in range(3)]
    await settle(admission, 2, 1)
    assert entered == [0, 1]
    release.set()
    await asyncio.gather(*tasks)
    assert entered == [0, 1, 2]
    assert (admission.open, admission.waiting) == (0, 0)


async def test_the_wait_is_bounded_and_the_refusal_says_when_to_come_back() -> None:
    admission, release = Admission(1, max_wait=0.05), asyncio.Event()
    task = asyncio.create_task(hold(admission, release, []))
    await settle(admission, 1, 0)
    with pytest.raises(Overloaded) as refused:
        async with admission.slot():
            raise AssertionError("no room")
    assert (refused.value.reason, refused.value.retry_after) == ("CONCURRENCY_LIMIT", 0.05)
    release.set()
    await task
    async with admission.slot():
        assert (admission.open, admission.waiting) == (1, 0)


@pytest.mark.alone
async def test_the_line_is_bounded_and_turns_away_at_once() -> None:
    admission, release = Admission(1, max_wait=60, max_waiters=3), asyncio.Event()
    tasks = [asyncio.create_task(hold(admission, release, [])) for _ in range(4)]
    await settle(admission, 1, 3)
    before = time.monotonic()
    with pytest.raises(Overloaded):
        async with admission.slot():
            raise AssertionError("no room")
    assert time.monotonic() - before < 1
    release.set()
    await asyncio.gather(*tasks)


async def test_a_cancelled_waiter_leaves_no_trace() -> None:
    admission, release = Admission(1, max_wait=60), asyncio.Event()
    tasks = [asyncio.create_task(hold(admission, release, [])) for _ in range(4)]
    await settle(admission, 1, 3)
    for task in tasks[1:]:
        task.cancel()
    await asyncio.wait(tasks[1:])
    await settle(admission, 1, 0)
    release.set()
    await tasks[0]
    async with admission.slot():
        assert admission.open == 1


@pytest.mark.alone
async def test_the_rate_is_kept_in_order_of_arrival() -> None:
    admission, order = Admission(1000, rate_limit=100, max_wait=60), []

    async def one(number: int) -> None:
        async with admission.slot():
            order.append(number)

    before = time.monotonic()
    await asyncio.gather(*(one(number) for number in range(130)))
    assert order == list(range(130))
    assert 0.9 < time.monotonic() - before < 5, "a burst of 100, then the next window"


async def test_a_rate_below_one_per_second_is_not_rounded_up() -> None:
    admission = Admission(1, rate_limit=0.5, max_wait=0.05)
    async with admission.slot():
        pass
    for _ in range(2):
        with pytest.raises(Overloaded) as refused:
            async with admission.slot():
                raise AssertionError("too soon")
        reason = refused.value.reason
        assert (reason, refused.value.retry_after) == ("RATE_LIMIT", 2.0), "the place was given back"
    assert (admission.open, admission.waiting) == (0, 0)


async def test_a_deadline_in_line_is_a_deadline_and_not_an_overload() -> None:
    admission, release = Admission(1, max_wait=60), asyncio.Event()
    task = asyncio.create_task(hold(admission, release, []))
    await settle(admission, 1, 0)
    with pytest.raises(DeadlinePassed):
        async with admission.slot(time.monotonic() + 0.05):
            raise AssertionError("no room")
    with pytest.raises(DeadlinePassed):
        async with admission.slot(time.monotonic() - 1):
            raise AssertionError("too late")
    release.set()
    await task


@pytest.mark.alone
async def test_over_the_wire_both_limits_are_resource_exhausted_with_pushback(serve: Serve) -> None:
    gate = asyncio.Event()
    async with serve(FakeEngine(held(gate)), max_concurrent_requests=1, admission_wait=0.05) as serving:
        running = asyncio.create_task(serving.client.complete("hi"))
        await serving.engine.stream_number(1)
        async with SlipstreamClient(serving.target, ONCE) as other:
            with pytest.raises(CallFailed) as failed:
                await other.complete("hi")
        assert (failed.value.code.name, failed.value.reason) == ("RESOURCE_EXHAUSTED", "CONCURRENCY_LIMIT")
        assert failed.value.retry_after is not None and 0.05 <= failed.value.retry_after <= 0.1
        gate.set()
        await running
        await serving.client.complete("hi")
        assert await serving.metric('slipstream_requests_rejected_total{reason="CONCURRENCY_LIMIT"}') == 1
    async with serve(rate_limit=1.0, admission_wait=0.05) as serving:
        await serving.client.complete("hi")
        async with SlipstreamClient(serving.target, ONCE) as other:
            with pytest.raises(CallFailed) as failed:
                await other.complete("hi")
        assert failed.value.reason == "RATE_LIMIT" and failed.value.retry_after is not None
        assert 1.0 <= failed.value.retry_after <= 2.0
