"""The line of a tenant against a plain list: who stands at its head, with and without prompts that are to be told."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Iterable

import numpy as np
import pytest

from core.scheduler.policy import Priority
from core.scheduler.waiting_queue import FEW, WaitingQueue
from core.types.request import Req
from core.types.sampling_params import SamplingParams


class Recorded(Priority):
    """Keeps the head that it is shown."""

    def __init__(self, window: int) -> None:
        self.window = window
        self.shown: list[Req] = []

    def choose(self, head: Iterable[Req], match_len: Callable[[Req], int]) -> Req:
        self.shown = [*head]
        return self.shown[match_len(self.shown[0]) % len(self.shown)]


def req(sequence: int, priority: int, told: bool) -> Req:
    params = SamplingParams(prompt_logprobs=0 if told else None)
    made = Req(str(sequence), 0, np.arange(3), params, 0, 1, priority=priority)
    made.sequence = sequence
    return made


@pytest.mark.parametrize("window", [1, 2, 7])
def test_the_head_is_that_of_a_sorted_list(window: int, seed: int) -> None:
    rng, policy = random.Random(seed), Recorded(window)
    queue, model, left = WaitingQueue(policy), list[Req](), list[Req]()
    for number in range(400):
        if left and rng.random() < 0.2:
            back = left.pop(rng.randrange(len(left)))
        else:
            back = req(number, rng.randrange(3), rng.random() < 0.5)
        if rng.random() < 0.6:
            queue.push(back)
            model.append(back)
        elif model:
            gone = model.pop(rng.randrange(len(model)))
            queue.remove(gone)
            left.append(gone)
        for scoring in (True, False):
            expected = sorted((each for each in model if scoring or not each.scores), key=policy.key)[:window]
            place = rng.randrange(7)
            best = queue.best(lambda _, place=place: place, scoring=scoring)  # type: ignore[misc]
            assert best is (expected[place % len(expected)] if expected else None)
            assert policy.shown == expected or not expected
        assert len(queue) == len(model) and set(queue.members()) == set(model)


@pytest.mark.parametrize("told", [False, True])
def test_requests_that_left_are_let_go(told: bool) -> None:
    """Behind a head that stays."""
    queue = WaitingQueue(Priority())
    queue.push(req(0, 0, told))
    refs = []
    for number in range(1, 4 * FEW):
        gone = req(number, 1, told)
        refs.append(weakref.ref(gone.prompt))
        queue.push(gone)
        queue.remove(gone)
    del gone
    gc.collect()
    assert sum(ref() is not None for ref in refs) <= FEW + 2


def test_a_request_waits_once() -> None:
    queue, first, other = WaitingQueue(Recorded(1)), req(1, 0, told=False), req(2, 0, told=False)
    for given in (first, first, other):
        queue.push(given)
    assert len(queue) == queue.waiting_of("") == 2
    for gone, left in ((first, 1), (first, 1), (other, 0), (other, 0)):
        queue.remove(gone)
        assert len(queue) == queue.waiting_of("") == left


def test_only_older_requests_are_passed_over() -> None:
    queue, first, second, third = WaitingQueue(Recorded(7)), *(req(number, 0, told=False) for number in (1, 2, 3))
    for given in (first, second, third):
        queue.push(given)
    queue.took(second)
    assert [each.passed_over for each in (first, second, third)] == [1, 0, 0]
