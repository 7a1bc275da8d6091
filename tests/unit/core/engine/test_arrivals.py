"""Requests that are not queued yet can be ended, and what they wait for is let go with them."""

from __future__ import annotations

import asyncio
import time

import pytest

from core.engine.pending_admissions import Arrivals
from core.errors import DeadlinePassed, Draining, RequestAborted
from tests.support.within import within


async def test_a_request_that_was_aborted_while_it_arrived_does_not_get_through() -> None:
    """Also where nothing looked in between: tokenising does not."""
    arrivals = Arrivals()
    through = False
    with pytest.raises(RequestAborted):
        with arrivals.entered("a"):
            assert "a" in arrivals and arrivals.abort("a") and arrivals.abort("a")
        through = True
    assert not through and "a" not in arrivals and not arrivals.abort("a")


async def test_all_that_arrive_end_with_the_same_word_and_the_first_word_counts() -> None:
    arrivals = Arrivals()
    with pytest.raises(RequestAborted), arrivals.entered("a"):
        with pytest.raises(Draining), arrivals.entered("b"):
            arrivals.abort("a")
            arrivals.end_all(Draining("going"))


async def wait_for(arrivals: Arrivals, work: asyncio.Future[None], deadline: float | None) -> None:
    with arrivals.entered("a"):
        await arrivals.wait("a", work, deadline)


@pytest.mark.parametrize(("aborted", "error"), [(True, RequestAborted), (False, DeadlinePassed)])
async def test_a_request_that_ends_lets_go_of_what_it_waited_for(aborted: bool, error: type[Exception]) -> None:
    arrivals, work = Arrivals(), asyncio.get_running_loop().create_future()
    waiting = asyncio.create_task(wait_for(arrivals, work, None if aborted else time.monotonic() - 1))
    await asyncio.sleep(0)
    assert "a" in arrivals and (not aborted or arrivals.abort("a"))
    async with within(10, "it ends although the work does not"):
        (ended,) = await asyncio.gather(waiting, return_exceptions=True)
    assert isinstance(ended, error) and work.cancelled()


async def test_work_that_is_done_in_time_is_what_it_waited_for() -> None:
    arrivals = Arrivals()
    with arrivals.entered("a"):
        assert await arrivals.wait("a", asyncio.sleep(0, "done"), time.monotonic() + 3600) == "done"
