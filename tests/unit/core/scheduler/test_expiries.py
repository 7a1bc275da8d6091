"""A request that ended is let go at once, however far away its deadline is."""

from __future__ import annotations

import gc
import weakref

import pytest

from core.scheduler.intake import FEW
from core.types.io import FinishReason
from tests.unit.core.scheduler.harness import Harness

FAR = 1e9


def many(harness: Harness, count: int, **limits: float) -> list[weakref.ref[object]]:
    """`count` requests, one after another, each to its end; their prompts, which only the requests hold."""
    prompts = []
    for _ in range(count):
        req = harness.add([1, 2, 3], max_tokens=2, **limits)
        prompts.append(weakref.ref(req.prompt))
        del req
        harness.drain()
    harness.seen.clear()
    harness.executor.batches.clear()
    gc.collect()
    return prompts


@pytest.mark.parametrize(
    "limits", [{"deadline": FAR}, {"queue_deadline": FAR}, {"deadline": FAR, "queue_deadline": 9.0}]
)
def test_finished_requests_are_not_held_until_their_deadline(limits: dict[str, float]) -> None:
    prompts = many(Harness(), 20, **limits)
    assert sum(prompt() is not None for prompt in prompts) == 0


def test_a_request_that_is_aborted_in_the_queue_is_let_go() -> None:
    harness = Harness(rows=1)
    running = harness.add([5, 6], max_tokens=100, deadline=FAR)
    waiting = [harness.add([1, 2, 3], deadline=FAR) for _ in range(3)]
    harness.step()
    for req in waiting:
        harness.end(req)
    harness.step()
    assert list(harness.scheduler.intake._expiring.values()) == [running]


def test_instants_of_those_that_left_are_few() -> None:
    """Beside those of live requests: a bounded number, whatever has passed through."""
    harness = Harness(rows=2)
    for live in (0, 1, 1):
        if live:
            harness.add([7], max_tokens=1, deadline=FAR)
        for _ in range(3 * FEW):
            harness.end(harness.add([1, 2, 3], deadline=FAR, queue_deadline=FAR - 1))
            harness.step()
            assert len(harness.scheduler.intake._expiries) <= 4 * len(harness.scheduler.intake._expiring) + FEW


def test_the_loop_is_not_woken_for_those_that_left() -> None:
    harness = Harness()
    short, long = harness.add([1, 2], max_tokens=2, deadline=50.0), harness.add([3, 4], max_tokens=90, deadline=FAR)
    while harness.seen[short].reason is None:
        harness.step()
    assert harness.scheduler.next_expiry() == FAR
    harness.end(long)
    harness.drain()
    assert harness.scheduler.next_expiry() is None
    assert harness.seen[long].reason is FinishReason.CANCELLED
