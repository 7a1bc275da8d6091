"""Forward thread, completion and inline executor: order, depth, failure. The step runner is a fake at the edge."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from core.batch.result import Published, StepBroken, StepResult
from core.batch.schedule_batch import ScheduleBatch
from core.executor.completion import Completion
from core.executor.forward_thread import ForwardThread
from core.executor.inline import InlineExecutor
from core.invariants import InvariantViolation
from core.memory.host_moves import CopyOut, HostCopy

NONE = np.empty(0, np.int64)


@dataclass
class Batch:
    """The one field of a batch that executors look at."""

    step_id: int


class Panic(BaseException):
    """Like `pyo3_runtime.PanicException`: no Exception."""


class Gate:
    """A device event that the test opens."""

    def __init__(self, is_open: bool = False) -> None:
        self._open = threading.Event()
        if is_open:
            self._open.set()

    def open(self) -> None:
        self._open.set()

    def query(self) -> bool:
        return self._open.is_set()

    def synchronize(self) -> None:
        assert self._open.wait(10)


@dataclass
class Launched:
    batch: Any
    copy_done: Gate

    def result(self) -> StepResult:
        self.copy_done.synchronize()
        return StepResult(self.batch.step_id, NONE, NONE, NONE, np.empty(0, np.bool_))


@dataclass
class Runner:
    """Launches steps whose copies are done when `gates` says so; fails at `fail_at`."""

    gates: dict[int, Gate] = field(default_factory=dict)
    fail_at: int = -1
    launched: list[int] = field(default_factory=list)
    began: Callable[[int], None] | None = None
    computes: Callable[[int], None] | None = None
    published: Callable[[int], None] | None = None

    def launch(
        self,
        batch: Any,
        computing: Callable[[], None] = lambda: None,
        published: Callable[[Any], None] = lambda _: None,
    ) -> Launched:
        if self.began is not None:
            self.began(batch.step_id)
        if batch.step_id == self.fail_at:
            raise RuntimeError("device lost")
        computing()
        if self.computes is not None:
            self.computes(batch.step_id)
        published(Published(batch.step_id, NONE, NONE, NONE, NONE))
        if self.published is not None:
            self.published(batch.step_id)
        self.launched.append(batch.step_id)
        return Launched(batch, self.gates.get(batch.step_id, Gate(is_open=True)))


@dataclass
class CopyRunner(Runner):
    """Copies to host memory have landed when they are begun."""

    copied: list[int] = field(default_factory=list)

    def copy_out(self, out: CopyOut) -> Gate:
        self.copied.append(out.number)
        return Gate(is_open=True)


class Waker:
    """Counts wake-ups and lets the test wait for the n-th."""

    def __init__(self) -> None:
        self.count = 0
        self._changed = threading.Condition()

    def __call__(self) -> None:
        with self._changed:
            self.count += 1
            self._changed.notify_all()

    def wait_for(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.count >= count, timeout=10)


def batch(step_id: int) -> ScheduleBatch:
    return Batch(step_id)  # type: ignore[return-value]


def test_results_come_in_order_one_wake_up_each() -> None:
    waker, runner = Waker(), Runner()
    thread = ForwardThread(runner, waker)  # type: ignore[arg-type]
    got = []
    for first in range(1, 20, 2):
        thread.submit(batch(first))
        thread.submit(batch(first + 1))
        waker.wait_for(first + 1)
        got += [r.step_id for r in thread.completed()]
    assert got == list(range(1, 21)) == runner.launched
    assert waker.count == 20 and thread.in_flight == 0
    thread.stop()
    thread.stop()


def two_steps(runner: Runner, waker: Waker) -> ForwardThread:
    """Both are submitted before the first one ends."""
    both = threading.Event()
    computes = runner.computes

    def wait(step_id: int) -> None:
        assert both.wait(10)
        if computes is not None:
            computes(step_id)

    runner.computes = wait
    thread = ForwardThread(runner, waker)  # type: ignore[arg-type]
    thread.submit(batch(1))
    thread.submit(batch(2))
    both.set()
    return thread


def test_a_result_is_delivered_when_the_step_behind_it_computes_and_not_before() -> None:
    """The loop shall have the interpreter while the device is busy, not while the next step is prepared."""
    waker, seen = Waker(), []
    runner = Runner(began=lambda step: seen.append((step, waker.count)))
    runner.computes = lambda step: waker.wait_for(step - 1)
    thread = two_steps(runner, waker)
    waker.wait_for(2)
    assert seen == [(1, 0), (2, 0)]
    assert [r.step_id for r in thread.completed()] == [1, 2]
    thread.stop()


def test_a_step_that_waited_for_the_one_behind_it_is_delivered_if_that_is_a_copy() -> None:
    """A copy is no step that lets go of the one before: the loop would wait for it for ever."""
    waker, queued = Waker(), threading.Event()
    runner = CopyRunner(computes=lambda _: _wait(queued))
    thread = ForwardThread(runner, waker)  # type: ignore[arg-type]
    thread.submit(batch(1))
    thread.copy_out(CopyOut((HostCopy(7, 1, NONE),), NONE))
    queued.set()
    waker.wait_for(2)
    assert [r.step_id for r in thread.completed()] == [1]
    assert thread.landed() == runner.copied == [7]
    thread.stop()


def _wait(event: threading.Event) -> None:
    assert event.wait(10)


def test_after_a_failed_step_nothing_is_copied() -> None:
    waker = Waker()
    runner = CopyRunner(fail_at=1)
    thread = ForwardThread(runner, waker)  # type: ignore[arg-type]
    thread.submit(batch(1))
    thread.copy_out(CopyOut((HostCopy(7, 1, NONE),), NONE))
    thread.stop()
    assert str(thread.completed()[0].error) == "device lost" and runner.copied == [] == thread.landed()


def test_a_result_outlives_the_failure_of_the_step_behind_it() -> None:
    waker = Waker()
    thread = two_steps(Runner(fail_at=2), waker)
    waker.wait_for(2)
    first, second = thread.completed()
    assert (first.step_id, first.error, second.step_id) == (1, None, 2)
    assert str(second.error) == "device lost"
    thread.stop()


def test_lengths_are_known_before_a_step_is_over_and_wake_a_reader_that_came_early() -> None:
    computes, drafts, waker = threading.Event(), threading.Event(), Waker()
    runner = Runner(computes=lambda _: _wait(computes), published=lambda _: _wait(drafts))
    thread = ForwardThread(runner, waker)  # type: ignore[arg-type]
    thread.submit(batch(1))
    assert thread.resolve_seq_lens(1) is None
    computes.set()
    waker.wait_for(1)
    found = thread.resolve_seq_lens(1)
    assert found is not None and found.step_id == 1 and thread.completed() == [], "it still makes drafts"
    drafts.set()
    waker.wait_for(2)
    assert [r.step_id for r in thread.completed()] == [1]
    thread.submit(batch(2))
    waker.wait_for(3)
    assert thread.completed() and waker.count == 3, "no reader has asked for the lengths of this one"
    assert thread.resolve_seq_lens(1) is None, "of the newest step only"
    thread.stop()


def _wait(event: threading.Event) -> None:
    assert event.wait(10)


def test_a_third_step_in_flight_is_refused() -> None:
    gate = Gate()
    thread = ForwardThread(Runner({1: gate}), Waker())  # type: ignore[arg-type]
    thread.submit(batch(1))
    thread.submit(batch(2))
    assert not thread.has_room and thread.in_flight == 2
    with pytest.raises(InvariantViolation, match="executor_depth"):
        thread.submit(batch(3))
    gate.open()
    thread.stop()
    assert [r.step_id for r in thread.completed()] == [1, 2]


def test_the_next_step_is_launched_while_the_first_still_runs() -> None:
    gate, waker, runner = Gate(), Waker(), Runner()
    runner.gates[1] = gate
    thread = ForwardThread(runner, waker)  # type: ignore[arg-type]
    thread.submit(batch(1))
    thread.submit(batch(2))
    thread._inbox.put(None)
    thread._thread.join(10)
    assert runner.launched == [1, 2], "launched although the first step's copies are not done"
    assert thread.completed() == [], "and step 2, done early, waits for step 1"
    gate.open()
    waker.wait_for(2)
    assert [r.step_id for r in thread.completed()] == [1, 2]


def test_a_failed_step_fails_those_behind_it_and_nothing_hangs() -> None:
    waker, runner = Waker(), Runner(fail_at=2)
    thread = ForwardThread(runner, waker)  # type: ignore[arg-type]
    thread.submit(batch(1))
    thread.submit(batch(2))
    waker.wait_for(2)
    first, second = thread.completed()
    thread.submit(batch(3))
    waker.wait_for(3)
    (third,) = thread.completed()
    assert first.error is None and str(second.error) == str(third.error) == "device lost"
    assert runner.launched == [1]
    thread.stop()


@pytest.mark.parametrize("kind", [RuntimeError, Panic])
def test_a_fault_found_while_waiting_becomes_a_failed_result(kind: type[BaseException]) -> None:
    class Faulty(Launched):
        def result(self) -> StepResult:
            raise kind("illegal address")

    waker = Waker()
    completion = Completion(waker)
    try:
        completion.bring(Faulty(batch(7), Gate(is_open=True)))  # type: ignore[arg-type]
    except kind:
        pytest.fail("it passed the thread that brought it")
    (result,) = completion.take()
    assert result.step_id == 7 and "illegal address" in str(result.error)


def test_a_panic_fails_its_own_step() -> None:
    """By its number, with what was computed before it; the steps behind it fail with the same cause."""
    waker, panic = Waker(), Panic("unreachable code")

    def computes(step_id: int) -> None:
        if step_id == 2:
            raise panic

    thread = two_steps(Runner(computes=computes), waker)
    waker.wait_for(2)
    first, second = thread.completed()
    thread.submit(batch(3))
    waker.wait_for(3)
    (third,) = thread.completed()
    assert [r.step_id for r in (first, second, third)] == [1, 2, 3] and first.error is None
    for failed in (second, third):
        assert isinstance(failed.error, StepBroken) and failed.error.__cause__ is panic
    thread.stop()


def test_completion_keeps_order_across_its_two_paths() -> None:
    gates = [Gate(), Gate(is_open=True), Gate(), Gate(is_open=True)]
    waker = Waker()
    completion = Completion(waker)
    for number, gate in enumerate(gates):
        completion.bring(Launched(batch(number), gate))  # type: ignore[arg-type]
    assert completion.take() == []
    for gate in gates:
        gate.open()
    waker.wait_for(4)
    assert [r.step_id for r in completion.take()] == [0, 1, 2, 3]
    completion.stop()
    completion.bring(Launched(batch(4), Gate(is_open=True)))  # type: ignore[arg-type]
    assert [r.step_id for r in completion.take()] == [4]


def test_inline_runs_inside_submit_and_holds_one() -> None:
    waker = Waker()
    inline = InlineExecutor(Runner(fail_at=2), waker)  # type: ignore[arg-type]
    inline.submit(batch(1))
    assert inline.in_flight == 1 and not inline.has_room and waker.count == 1
    with pytest.raises(InvariantViolation, match="executor_depth"):
        inline.submit(batch(2))
    assert [r.step_id for r in inline.completed()] == [1]
    inline.submit(batch(2))
    assert isinstance(inline.completed()[0].error, RuntimeError)
    inline.stop()
    assert not inline.has_room
