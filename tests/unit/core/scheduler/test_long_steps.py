"""Where steps are long, the next is planned late, and tenants with little work have some to themselves."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from core.scheduler.pace import LATEST, LONG_SECONDS, SHARED_SECONDS, Pace
from core.types.request import Req
from tests.unit.core.scheduler.harness import Harness

AT_ONCE = float("-inf")


def paced(*steps: tuple[float, int]) -> Pace:
    """Behind steps of so many seconds and tokens, at 0 when the last of them ends."""
    pace, now = Pace(), -sum(seconds for seconds, _ in steps)
    for seconds, tokens in steps:
        pace.submitted(now, tokens)
        now += seconds
        pace.finished(now)
    pace.shared(0.0)
    return pace


@pytest.mark.parametrize(
    ("steps", "tokens", "expected"),
    [
        ([], 10, AT_ONCE),
        ([(1.0, 10)], 10, LATEST),
        ([(1.0, 10)], 20, LATEST),
        ([(1.0, 10)], 21, AT_ONCE),
        ([(1.0, 10)], 5, LATEST / 2),
        ([(1.0, 10)], 4, AT_ONCE),
        ([(1.0, 10), (0.4, 10)], 10, 0.4 * LATEST),
        ([(1.0, 10), (0.01, 1)], 10, LATEST),
        ([(1.0, 10), (0.01, 1)], 1, AT_ONCE),
        ([(LONG_SECONDS * 0.99, 10)], 10, AT_ONCE),
        ([(1.0, 10), *[(0.01, 1)] * 7], 10, LATEST),
        ([(1.0, 10), *[(0.01, 1)] * 8], 10, AT_ONCE),
    ],
)
def test_a_step_is_expected_to_take_what_the_quickest_of_its_like_took(
    steps: list[tuple[float, int]], tokens: int, expected: float
) -> None:
    pace = paced(*steps)
    assert pace.due() == AT_ONCE, "nothing runs"
    pace.submitted(-7.0, tokens)
    assert pace.due() == pytest.approx(expected), "from the end of the one before it"


def test_a_tenant_alone_waits_for_no_other() -> None:
    pace = paced((1.0, 10))
    pace.submitted(SHARED_SECONDS, 10)
    assert pace.due() == SHARED_SECONDS + LATEST, "the other may come back"
    pace.finished(SHARED_SECONDS + 1)
    pace.submitted(SHARED_SECONDS + 1, 10)
    assert pace.due() == AT_ONCE


def test_a_step_behind_an_idle_device_begins_when_it_is_submitted() -> None:
    pace = paced((1.0, 10))
    pace.submitted(5.0, 10)
    assert pace.due() == 5.0 + LATEST
    pace.finished(5.5)
    pace.submitted(5.5, 10)
    assert pace.due() == 5.5 + 0.5 * LATEST, "it took half a second, and not the time without one"


def test_the_next_step_is_planned_when_most_of_the_one_that_runs_is_over() -> None:
    world = Harness(long_seconds=0.5)
    first = world.add(range(4), 30)
    world.add(range(4), 1, tenant="b")
    for _ in range(5):
        world.step()
    world.step(run=False)
    assert world.executor.in_flight == 1, "put off"
    assert world.scheduler.next_expiry() == pytest.approx(world.now + LATEST)
    late = world.add(range(7), 2)
    world.now += LATEST - 0.01
    world.scheduler.step(world.now)
    assert world.executor.in_flight == 1
    world.now += 0.01
    world.scheduler.step(world.now)
    assert world.executor.in_flight == 2 and late.row, "and then with what came meanwhile"
    assert world.scheduler.next_expiry() is None
    world.drain()
    world.expect(first)
    world.expect(late)


@pytest.mark.parametrize("long_seconds", [0.5, math.inf])
def test_a_short_prompt_is_not_in_one_step_with_the_work_of_others(long_seconds: float) -> None:
    world = Harness(rows=40, pages=400, long_seconds=long_seconds, chunked_prefill_size=64)
    flood = [world.add([n, 2, 3], 40, tenant="a") for n in range(32)]
    for _ in range(12):
        world.step()
    own = [world.add(range(2), 6, tenant="b"), world.add(range(3), 6, tenant="c")]
    before = len(world.executor.batches)
    for _ in range(6):
        world.step()
    owned = {req.row for req in own}
    first, behind = next(
        pair for pair in pairwise(world.executor.batches[before:]) if owned & set(pair[0].rows.tolist())
    )
    expected = (34, 34) if long_seconds == math.inf else (2, 34)
    assert (len(first.rows), len(behind.rows)) == expected, "the next is for all"
    world.drain()
    for req in (*flood, *own):
        world.expect(req)


def test_newcomers_without_end_leave_the_others_every_second_step() -> None:
    world = Harness(rows=40, pages=400, long_seconds=0.5, chunked_prefill_size=64)
    flood = [world.add([n, 2, 3], 90, tenant="a") for n in range(32)]
    many: list[Req] = []
    for turn in range(40):
        many.append(world.add(range(3), 1, tenant=f"b{turn}"))
        world.step()
    rows = {req.row for req in flood}
    held = [len(rows & set(batch.rows.tolist())) for batch in world.executor.batches[8:]]
    assert 0 in held and set(held) == {0, 32}
    assert all(before or behind for before, behind in pairwise(held)), "never twice in a row"
    world.drain()
    for req in (*flood, *many):
        world.expect(req)


def test_a_tenant_with_many_that_wait_is_no_light_one() -> None:
    world = Harness(rows=40, pages=400, long_seconds=0.5, chunked_prefill_size=64)
    flood = [world.add([n, 2, 3], 40, tenant="a") for n in range(32)]
    for _ in range(12):
        world.step()
    others = [world.add([n], 4, tenant="b") for n in range(5)]
    before = len(world.executor.batches)
    while not all(req.row for req in others):
        world.step()
    rows = {req.row for req in flood}
    assert all(rows & set(batch.rows.tolist()) for batch in world.executor.batches[before:])
    world.drain()


def test_a_long_prompt_makes_no_light_work_of_all_others() -> None:
    """A step computes a part of it only: the rows that decode beside it are as much work as that."""
    world = Harness(rows=40, pages=400, max_len=1024, long_seconds=0.5, chunked_prefill_size=64)
    many = [world.add([n, 2, 3], 60, tenant="a") for n in range(16)]
    for _ in range(12):
        world.step()
    long = world.add([n % 60 for n in range(900)], 1, tenant="b")
    while not long.row:
        world.step()
    before = len(world.executor.batches)
    for turn in range(6):
        many.append(world.add([turn, 5, 6], 2, tenant="a"))
        world.step()
    assert all(long.row in batch.rows for batch in world.executor.batches[before:])
    world.drain()
    for req in (*many, long):
        world.expect(req)
