"""The overlap executor: a thread of its own launches steps, so the device never waits for the scheduler."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from core.batch.result import Published, StepResult
from core.batch.schedule_batch import ScheduleBatch
from core.executor.completion import Completion
from core.executor.interface import MAX_DEPTH
from core.executor.landings import Landings
from core.executor.launched_step import LaunchedStep
from core.executor.length_fence import LengthFence
from core.executor.step import StepRunner
from core.invariants import check
from core.memory.host_moves import CopyOut, HostCopy


@dataclass(frozen=True, slots=True)
class _Renewal:
    """What runs the steps behind it; `taken` is done once that was taken."""

    runner: StepRunner | None
    taken: Future[None] = field(default_factory=Future)


class ForwardThread:
    """Depth two (law 10): while one step runs, the next is already submitted, before its decode inputs exist.

    A step that is done while the next one waits is delivered only once that next one computes, a fraction of a
    millisecond later. Both this thread and the event loop need the interpreter. With the delay the loop has it while
    the device computes a whole step; without it both wanted it exactly while the device had nothing to do (4.4 instead
    of 3.1 ms a token, on two cores, for a model of 24 million parameters).

    After a step has failed, the steps behind it fail without being run: they would read what it did not write.
    """

    def __init__(self, runner: StepRunner, wake: Callable[[], None]) -> None:
        self._runner: StepRunner | None = runner
        self._completion = Completion(wake)
        self._fence = LengthFence(wake)
        self._landings = Landings(wake)
        self._inbox: SimpleQueue[Any] = SimpleQueue()
        """A batch, a copy, a renewal; None behind the last."""
        self._in_flight = 0
        self._held: LaunchedStep | None = None
        self._thread = threading.Thread(target=self._run, name="slipstream-forward", daemon=True)
        self._thread.start()
        self._stopped = False

    @property
    def in_flight(self) -> int:
        """Batches submitted whose results `completed` has not returned yet."""
        return self._in_flight

    @property
    def has_room(self) -> bool:
        """Whether fewer than two steps are in flight, and `stop` was not called."""
        return self._in_flight < MAX_DEPTH and not self._stopped

    def submit(self, batch: ScheduleBatch) -> None:
        """Hand a frozen step to the thread; returns at once. Raises InvariantViolation without room."""
        check("executor_depth", self.has_room, in_flight=self._in_flight, stopped=self._stopped)
        self._in_flight += 1
        self._inbox.put(batch)

    def copy_out(self, out: CopyOut) -> None:
        """See `HostCopies`."""
        self._inbox.put(out)

    def host_views(self, copy: HostCopy, start: int = 0) -> Sequence[memoryview]:
        """See `HostCopies`."""
        host = self._running.state.host
        assert host is not None, "the scheduler copies where there is room"
        return host.views(copy, start)

    def landed(self) -> list[int]:
        """See `HostCopies`."""
        return self._landings.take()

    def renew(self, runner: StepRunner | None) -> Future[None]:
        """See `Renewable`."""
        check("executor_renewal", self._in_flight == 0, in_flight=self._in_flight)
        renewal = _Renewal(runner)
        self._inbox.put(renewal)
        return renewal.taken

    def completed(self) -> list[StepResult]:
        """Results since the last call, in submission order."""
        results = self._completion.take()
        self._in_flight -= len(results)
        return results

    def resolve_seq_lens(self, step_id: int) -> Published | None:
        """See `Executor`."""
        return self._fence.resolve(step_id)

    def stop(self) -> None:
        """Run what was submitted, then end both threads. Idempotent."""
        if not self._stopped:
            self._stopped = True
            self._inbox.put(None)
            self._thread.join()
            self._completion.stop()
            self._landings.stop()

    def _run(self) -> None:
        """Serve until `stop`. Any exception, a panic of native code included, reaches the scheduler as a failure."""
        try:
            self._serve()
        except BaseException as error:
            self._completion.break_off(error)

    def _serve(self) -> None:
        failure: BaseException | None = None
        while (told := self._inbox.get()) is not None:
            failure = self._do(told, failure)
        self._let_go()

    def _do(self, told: Any, failure: BaseException | None) -> BaseException | None:
        """Carry out what the inbox had; `failure` is what later steps fail by, and so is what this returns."""
        if isinstance(told, _Renewal):
            self._let_go()
            self._runner = told.runner
            told.taken.set_result(None)
        elif isinstance(told, CopyOut):
            if failure is None:
                self._landings.bring(told.number, self._running.copy_out(told))
            if self._inbox.empty():
                # A copy is no step that would let go of the one before.
                self._let_go()
        elif failure is None:
            return self._launch(told)
        else:
            self._completion.bring(StepResult.failed(told.step_id, failure))
        return failure

    @property
    def _running(self) -> StepRunner:
        assert self._runner is not None, "nothing is submitted while the engine sleeps"
        return self._runner

    def _launch(self, batch: ScheduleBatch) -> BaseException | None:
        try:
            launched = self._running.launch(batch, self._let_go, self._fence.publish)
        except BaseException as error:
            self._let_go()
            self._completion.bring(StepResult.failed(batch.step_id, error))
            return error
        # The step before goes first; usually `launch` has let it go already, as it began to compute.
        self._let_go()
        self._held = launched
        # Held back only if the next step waits and the results are there: else nothing is gained by a delay.
        if self._inbox.empty() or not launched.copy_done.query():
            self._let_go()
        return None

    def _let_go(self) -> None:
        """Deliver the step that is held back, if there is one."""
        held, self._held = self._held, None
        if held is not None:
            self._completion.bring(held)
