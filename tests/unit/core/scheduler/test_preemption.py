"""Under `priority` a waiting request of a higher class takes the place of running ones: when, whose, how often."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from core.config import SchedulerConfig
from core.errors import ConfigError
from core.memory.cross.cross_pages import CrossPages
from core.memory.recurrent.state_slots import StateSlots
from core.scheduler.preemption import MIN_TOKENS, MOST_PER_PLAN
from core.scheduler.prefill_adder import RESERVE_MIN
from core.types.io import Pooling
from core.types.request import Req, RequestState
from tests.unit.core.scheduler.harness import Harness

BOUND = 3
"""Steps from arrival to first token of a prompt of one chunk, where a place can be taken: plan, run, take results."""


def harness(**settings: object) -> Harness:
    return Harness(**{"rows": 2, "policy": "priority", **settings})  # type: ignore[arg-type]


def busy(world: Harness, count: int = 2, priority: int = 10, max_tokens: int = 100, prompt: int = 3) -> list[Req]:
    """Requests that run and have put out a few tokens each."""
    reqs = [world.add([i + 1, *range(2, prompt + 1)], max_tokens=max_tokens, priority=priority) for i in range(count)]
    for _ in range(6):
        world.step()
    assert all(req.state is RequestState.RUNNING and world.seen[req].tokens for req in reqs)
    return reqs


def wait(world: Harness, req: Req, limit: int = 300) -> int:
    """Steps until its first token."""
    for steps in range(1, limit):
        world.step()
        if world.seen[req].tokens:
            return steps
    pytest.fail(f"no token within {limit} steps")


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("cache", ["radix", "none"])
def test_a_request_of_a_higher_class_waits_a_handful_of_steps_for_a_row(depth: int, cache: str) -> None:
    world = harness(depth=depth, cache=cache)
    low = busy(world)
    high = world.add([9, 8], max_tokens=3, priority=-10)
    assert wait(world, high) <= BOUND
    assert [req.retractions for req in low] == [0, 1], "one row was missing, and the last in line gave it"
    world.drain()
    for req in (*low, high):
        world.expect(req)
    stats = world.scheduler.stats
    assert stats.preemptions == stats.priority_preemptions == 1


def test_without_it_the_request_waits_until_a_row_is_free() -> None:
    world = harness(priority_preemption=False)
    busy(world)
    high = world.add([9, 8], max_tokens=3, priority=-10)
    assert wait(world, high) > 80
    world.drain()
    assert world.scheduler.stats.preemptions == 0


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
def test_other_policies_know_no_classes(policy: str) -> None:
    world = harness(policy=policy)
    busy(world)
    high = world.add([9, 8], max_tokens=3, priority=-10)
    assert wait(world, high) > 80
    world.drain()
    assert world.scheduler.stats.preemptions == 0


@pytest.mark.parametrize(("threshold", "difference", "preempts"), [(1, 0, 0), (1, 1, 1), (5, 4, 0), (5, 5, 1)])
def test_the_difference_must_reach_the_threshold(threshold: int, difference: int, preempts: int) -> None:
    world = harness(priority_preemption_threshold=threshold)
    busy(world)
    high = world.add([9, 8], max_tokens=3, priority=10 - difference)
    for _ in range(20):
        world.step()
    assert bool(world.seen[high].tokens) is bool(preempts)
    world.drain()
    assert world.scheduler.stats.priority_preemptions == preempts


def test_a_threshold_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="priority_preemption_threshold"):
        SchedulerConfig(priority_preemption_threshold=0)


def test_pages_too_are_taken_and_only_as_many_requests_give_way_as_are_needed() -> None:
    """12 pages, three requests of three each; the newcomer needs five: one is not enough with the reserve, two are."""
    world = harness(rows=8, pages=12, page_size=4, cache="none")
    low = busy(world, 3, max_tokens=20, prompt=4)
    high = world.add(range(18), max_tokens=2, priority=0)
    assert wait(world, high) <= BOUND + 1
    assert low[0].retractions == 0 and sum(req.retractions for req in low) == world.scheduler.stats.preemptions
    world.drain()
    for req in (*low, high):
        world.expect(req)


def test_nobody_gives_way_where_that_would_not_help() -> None:
    """The rest of the pool is held by requests of the newcomer's own class."""
    world = harness(rows=8, pages=16, page_size=4, cache="none")
    own = world.add(range(40), max_tokens=20, priority=0)
    low = busy(world, 1, max_tokens=10, prompt=4)
    high = world.add(range(30), max_tokens=2, priority=0)
    for _ in range(5):
        world.step()
    assert own.state is RequestState.RUNNING and high.state is RequestState.WAITING
    world.drain()
    for req in (own, *low, high):
        world.expect(req)
    assert world.scheduler.stats.priority_preemptions == 0


def test_at_most_a_few_give_way_in_one_plan() -> None:
    world = harness(rows=8, pages=80, depth=1, chunked_prefill_size=64)
    low = busy(world, 8)
    high = [world.add([9, i], max_tokens=40, priority=0) for i in range(8)]
    world.step()
    assert sum(req.retractions for req in low) == MOST_PER_PLAN
    world.step()
    assert sum(req.retractions for req in low) == 2 * MOST_PER_PLAN
    world.drain()
    for req in (*low, *high):
        world.expect(req)


def test_who_gave_way_must_advance_before_it_does_so_again() -> None:
    """One row, and a request of a higher class always about to arrive: the low one gets its share in between."""
    world = harness(rows=1, depth=1)
    low = world.add([1, 2, 3], max_tokens=60, priority=10)
    moments: list[int] = []
    for _ in range(400):
        if len(world.seen) == sum(seen.terminals for seen in world.seen.values()) + 1:
            # Only the low one is live.
            world.add([9, 8], max_tokens=1, priority=0)
        retractions, tokens = low.retractions, len(world.seen[low].tokens)
        world.step()
        if low.retractions > retractions:
            moments.append(tokens)
        if world.seen[low].terminals:
            break
    assert len(moments) >= 3
    assert all(later - earlier >= MIN_TOKENS for earlier, later in itertools.pairwise(moments))
    world.drain()
    world.expect(low)


def test_who_is_protected_is_passed_over_for_the_next_in_line() -> None:
    world = harness(rows=2, depth=1, pages=64)
    first, second = busy(world, 2)
    world.add([9, 8], max_tokens=1, priority=0)
    for _ in range(4):
        world.step()
    assert (first.retractions, second.retractions) == (0, 1) and second.state is RequestState.RUNNING
    high = world.add([9, 7], max_tokens=30, priority=0)
    assert wait(world, high) <= BOUND
    assert (first.retractions, second.retractions) == (1, 1), "the last in line has only just come back"
    world.drain()
    for req in (first, second, high):
        world.expect(req)


def test_the_place_goes_to_the_request_it_was_made_for() -> None:
    world = harness(rows=2, depth=1)
    busy(world)
    third = world.add([7, 7], max_tokens=3, priority=0)
    high = world.add([9, 8], max_tokens=3, priority=-10)
    other = world.add([9, 9], max_tokens=3, priority=10)
    world.step()
    assert high.state is third.state is RequestState.RUNNING and other.state is RequestState.WAITING
    world.drain()


def test_the_reserve_is_not_raised() -> None:
    world = harness()
    busy(world)
    high = world.add([9, 8], max_tokens=3, priority=-10)
    wait(world, high)
    assert world.scheduler.stats.priority_preemptions == 1
    assert world.scheduler._planner._adder._reserve_share == RESERVE_MIN


def test_what_is_planned_to_its_end_is_let_be() -> None:
    """The last token is in flight: the row is free a step from now, and taking it back would cost a whole prompt."""
    world = harness(rows=1)
    low = world.add([1, 2, 3], max_tokens=2, priority=10)
    world.step(run=False)
    high = world.add([9, 8], max_tokens=3, priority=0)
    world.step(run=False)
    assert world.executor.in_flight == 2 and low.state is RequestState.RUNNING
    world.drain()
    assert low.retractions == 0
    world.expect(low)
    world.expect(high)


@pytest.mark.parametrize("mixed_chunk", [True, False])
def test_a_long_prompt_of_a_lower_class_is_overtaken(mixed_chunk: bool) -> None:
    """No place is missing, but the long prompt would take the whole budget of every step."""
    world = harness(rows=4, pages=64, max_len=160, chunked_prefill_size=4, mixed_chunk=mixed_chunk)
    long = world.add(range(120), max_tokens=3, priority=10)
    for _ in range(3):
        world.step()
    high = world.add([9, 8], max_tokens=3, priority=0)
    assert wait(world, high) <= BOUND
    assert not world.seen[long].tokens
    world.drain()
    world.expect(long)
    world.expect(high)
    assert world.scheduler.stats.preemptions == 0


def test_embeddings_are_preempted_once_and_start_over() -> None:
    world = harness(rows=1, pages=64, max_len=160, chunked_prefill_size=4, depth=1, cache="none")
    text = world.add(range(100), max_tokens=0, priority=10)
    text.pooling = Pooling.MEAN
    world.step()
    for tokens in (1, 2):
        world.add([9, tokens], max_tokens=tokens, priority=0)
        for _ in range(4):
            world.step()
    assert text.retractions == 1, "what puts out no tokens would else never come to its end"
    assert text.state is RequestState.RUNNING


@pytest.mark.parametrize(
    "companion", [lambda: StateSlots(2, 9), lambda: CrossPages(6, 4, 9)], ids=["recurrent states", "cross pages"]
)
def test_places_in_other_pools_are_taken_as_well(companion: object) -> None:
    """Rows and pages are plenty; what is missing is a state slot, or cross pages."""
    world = harness(rows=8, cache="none", companions=[companion()], depth=1)  # type: ignore[operator]
    inputs = np.arange(10) if isinstance(world.memory.companions[0], CrossPages) else None

    def ask(prompt: list[int], priority: int) -> Req:
        req = world.add(prompt, max_tokens=60, priority=priority)
        req.encoder_ids = inputs
        return req

    low = [ask([i, 2], 10) for i in range(2)]
    for _ in range(3):
        world.step()
    high = ask([9, 2], 0)
    world.step()
    assert high.state is RequestState.RUNNING and [req.retractions for req in low] == [0, 1]
