"""Order of admission, and who gives way."""

from __future__ import annotations

import numpy as np
import pytest

from core.scheduler.policy import LPM_PATIENCE, POLICIES, victim
from core.scheduler.waiting_queue import WaitingQueue
from core.types.request import Req
from core.types.sampling_params import SamplingParams


def req(sequence: int, priority: int = 0, prompt: int = 3) -> Req:
    made = Req(str(sequence), 0, np.arange(prompt), SamplingParams(), 0, 1, priority=priority)
    made.sequence = sequence
    return made


def order(queue: WaitingQueue, matches: dict[int, int] | None = None) -> list[int]:
    """Sequence numbers in the order of admission."""
    taken = []
    while (best := queue.best(lambda r: (matches or {}).get(r.sequence, 0))) is not None:
        queue.took(best)
        taken.append(best.sequence)
    return taken


@pytest.mark.parametrize(
    ("policy", "expected"), [("fcfs", [1, 2, 3, 4]), ("priority", [3, 1, 4, 2]), ("lpm", [2, 4, 1, 3])]
)
def test_order_of_admission(policy: str, expected: list[int]) -> None:
    queue = WaitingQueue(POLICIES[policy]())
    for sequence, priority in ((4, 1), (2, 5), (1, 1), (3, 0)):
        queue.push(req(sequence, priority))
    assert len(queue) == 4
    assert order(queue, {2: 64, 4: 32}) == expected
    assert len(queue) == 0


def test_a_request_taken_out_is_never_chosen_and_may_come_back() -> None:
    queue = WaitingQueue(POLICIES["fcfs"]())
    first, second = req(1), req(2)
    for each in (first, second, first):
        queue.push(each)
    assert len(queue) == 2
    queue.remove(first)
    assert first not in queue and queue.members() == [second]
    queue.push(first)
    assert order(queue) == [1, 2], "a retracted request keeps its place"


def test_the_impatient_go_first() -> None:
    queue = WaitingQueue(POLICIES["lpm"]())
    cold = req(1)
    queue.push(cold)
    for sequence in range(2, 80):
        queue.push(req(sequence))
    admitted = order(queue, dict.fromkeys(range(2, 80), 16))
    assert admitted.index(1) == LPM_PATIENCE


@pytest.mark.parametrize(("policy", "loser"), [("fcfs", 3), ("priority", 2), ("lpm", 3)])
def test_the_first_in_line_never_gives_way(policy: str, loser: int) -> None:
    running = [req(2, priority=9), req(1, priority=0), req(3, priority=1)]
    assert victim(running, POLICIES[policy]()).sequence == loser
