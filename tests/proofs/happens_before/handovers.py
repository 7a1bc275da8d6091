"""Recording twins of what the real executors hand work over with: a queue, a deque, a thread.

Put in place of the names that the executor's modules import, so production has no hook for them. Locks are left
alone: an order that only a lock happened to make would hide that a hand-over is missing.
"""

from __future__ import annotations

import threading
from collections import deque
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from core.batch.result import StepResult
from core.batch.schedule_batch import ScheduleBatch
from core.executor import completion, forward_thread
from core.executor.forward_thread import ForwardThread
from core.executor.launched_step import RESULTS
from tests.proofs.happens_before.clocks import VectorClocks


def record_handovers(patch: pytest.MonkeyPatch, clocks: VectorClocks) -> None:
    """From here on, forward threads and completions tell `clocks` what passes between threads."""

    class RecordedQueue(SimpleQueue[Any]):
        def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
            super().put(_sent(clocks, item))

        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            return _received(clocks, super().get())

    class RecordedDeque(deque[Any]):
        def append(self, item: Any) -> None:
            super().append(_sent(clocks, item))

        def popleft(self) -> Any:
            return _received(clocks, super().popleft())

    class RecordedThread(threading.Thread):
        def start(self) -> None:
            clocks.sent(("started", id(self)))
            super().start()

        def run(self) -> None:
            clocks.received(("started", id(self)))
            super().run()
            clocks.sent(("ended", id(self)))

        def join(self, timeout: float | None = None) -> None:
            super().join(timeout)
            clocks.received(("ended", id(self)))

    threads = SimpleNamespace(Thread=RecordedThread, Lock=threading.Lock)
    for module in (forward_thread, completion):
        patch.setattr(module, "SimpleQueue", RecordedQueue)
        patch.setattr(module, "threading", threads)
    patch.setattr(completion, "deque", RecordedDeque)
    _record_ends(patch, clocks)


def _record_ends(patch: pytest.MonkeyPatch, clocks: VectorClocks) -> None:
    """The scheduler writes a batch before it submits it, and reads a result once it has it."""
    submit, completed = ForwardThread.submit, ForwardThread.completed

    def recorded_submit(self: ForwardThread, batch: ScheduleBatch) -> None:
        clocks.wrote("batch", (batch.step_id,))
        submit(self, batch)

    def recorded_completed(self: ForwardThread) -> list[StepResult]:
        results = completed(self)
        for result in results:
            if result.error is None:
                clocks.read(RESULTS, (result.step_id,))
        return results

    patch.setattr(ForwardThread, "submit", recorded_submit)
    patch.setattr(ForwardThread, "completed", recorded_completed)


class _Parcel:
    """An item on its way; identity is the order's token."""

    def __init__(self, item: Any) -> None:
        self.item = item


def _sent(clocks: VectorClocks, item: Any) -> _Parcel:
    parcel = _Parcel(item)
    clocks.sent(parcel)
    return parcel


def _received(clocks: VectorClocks, parcel: _Parcel) -> Any:
    clocks.received(parcel)
    return parcel.item
