"""Turns launched steps into results off the event loop: one wake-up per step, never one per token."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

from core.batch.result import StepResult
from core.executor.launched_step import LaunchedStep

Launched = LaunchedStep | StepResult
"""A step on the device, or the result of one that failed before it got there."""


class Completion:
    """Waits for each step's `copy_done` in order, appends its result to a deque, and calls `wake` once.

    A step whose copies are done when it arrives (always so on the CPU) is completed by the thread that calls `bring`.
    Others are handed to the waiter thread, which is started for the first of them.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._done: deque[StepResult] = deque()
        self._queue: SimpleQueue[Launched | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        # Steps handed to the waiter and not delivered yet: the forward thread adds, the waiter subtracts.
        self._pending = 0
        self._lock = threading.Lock()

    def break_off(self, error: BaseException) -> None:
        """Deliver a failure that belongs to no step: the calling thread cannot go on. Callable from any thread.

        Without it a thread of the executor would end in silence, and every stream would wait for its next step.
        """
        self._done.append(StepResult.failed(0, error))
        self._wake()

    def bring(self, launched: Launched) -> None:
        """Take over a step, in submission order. Called by the forward thread only."""
        with self._lock:
            # Not past a step that the waiter still has: results keep the order of submission.
            direct = self._pending == 0 and (isinstance(launched, StepResult) or launched.copy_done.query())
            if not direct:
                self._pending += 1
        if direct:
            self._deliver(launched)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._wait, name="slipstream-completion", daemon=True)
            self._thread.start()
        self._queue.put(launched)

    def take(self) -> list[StepResult]:
        """Everything delivered so far, oldest first. Called by the loop thread only."""
        taken: list[StepResult] = []
        while self._done:
            taken.append(self._done.popleft())
        return taken

    def stop(self) -> None:
        """Deliver what was brought, then end the waiter thread. Idempotent."""
        if self._thread is not None:
            self._queue.put(None)  # behind everything brought, so the waiter delivers that first
            self._thread.join()
            self._thread = None

    def _wait(self) -> None:
        try:
            while (launched := self._queue.get()) is not None:
                self._deliver(launched)
                with self._lock:
                    self._pending -= 1
        except BaseException as error:
            self.break_off(error)

    def _deliver(self, launched: Launched) -> None:
        self._done.append(_result_of(launched))
        self._wake()


def _result_of(launched: Launched) -> StepResult:
    if isinstance(launched, StepResult):
        return launched
    try:
        return launched.result()
    except BaseException as error:  # a device fault surfaces at the first wait after it, a panic anywhere
        return StepResult.failed(launched.batch.step_id, error)
