"""Results leave in the order of their steps, also while the waiter is in the middle of an earlier one."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from core.batch.result import StepResult
from core.executor.completion import Completion
from tests.unit.core.executor.test_executors import Gate, Launched, Waker, batch


@dataclass
class Watched(Launched):
    """Says when a thread has begun to wait for its result."""

    awaited: threading.Event = field(default_factory=threading.Event)

    def result(self) -> StepResult:
        self.awaited.set()
        return super().result()


def test_a_step_that_is_done_does_not_overtake_the_one_that_the_waiter_is_at() -> None:
    waker, gate = Waker(), Gate()
    completion = Completion(waker)
    slow = Watched(batch(1), gate)
    completion.bring(slow)  # type: ignore[arg-type]
    assert slow.awaited.wait(10)
    # The waiter has taken step 1 out of its queue, and its result is not there yet.
    completion.bring(Launched(batch(2), Gate(is_open=True)))  # type: ignore[arg-type]
    assert completion.take() == [] and waker.count == 0
    gate.open()
    waker.wait_for(2)
    assert [result.step_id for result in completion.take()] == [1, 2]
    completion.stop()


def test_a_failed_step_does_not_overtake_either() -> None:
    waker, gate = Waker(), Gate()
    completion = Completion(waker)
    slow = Watched(batch(1), gate)
    completion.bring(slow)  # type: ignore[arg-type]
    assert slow.awaited.wait(10)
    completion.bring(StepResult.failed(2, RuntimeError("device lost")))
    assert completion.take() == []
    gate.open()
    waker.wait_for(2)
    assert [(result.step_id, result.error is None) for result in completion.take()] == [(1, True), (2, False)]
    completion.stop()


def test_once_the_waiter_has_delivered_everything_no_step_is_handed_over_any_more() -> None:
    """The short way: a result that is there when its step is brought is delivered by that very call."""
    waker, gate = Waker(), Gate()
    completion = Completion(waker)
    completion.bring(Launched(batch(1), gate))  # type: ignore[arg-type]
    gate.open()
    waker.wait_for(1)
    completion.stop()
    assert [result.step_id for result in completion.take()] == [1]
    completion.bring(Launched(batch(2), Gate(is_open=True)))  # type: ignore[arg-type]
    assert [result.step_id for result in completion.take()] == [2] and waker.count == 2
    assert completion._thread is None, "no waiter was needed again"
