"""An executor that is loop, forward thread and completion waiter in one thread, in an order that a seed picks.

Everything but the interleaving is production: `StepRunner` launches, `LaunchedStep` waits and reads. The recorder is
told which of the three threads each piece of work belongs to, and of the hand-overs that the real executor makes.
"""

from __future__ import annotations

import random
from collections import deque

from torch.utils._python_dispatch import _disable_current_modes

from core.batch.result import Published, StepResult
from core.batch.schedule_batch import ScheduleBatch
from core.device.event import Event
from core.executor.interface import MAX_DEPTH
from core.executor.launched_step import RESULTS, LaunchedStep
from core.executor.step import StepRunner
from core.memory.host_moves import CopyOut, HostCopy, Rejoined
from tests.proofs.happens_before.clocks import VectorClocks
from tests.proofs.happens_before.lazy_streams import LazyDevice

FORWARD_THREAD, WAITER, LANDINGS = "forward thread", "completion waiter", "landings"

INTERRUPTIONS = 0.4
"""How likely the waiter comes in between, at each point where it could."""


class SeededExecutor:
    """`core.executor.interface.Executor` whose progress happens inside `completed`, as much of it as the dice say."""

    def __init__(self, runner: StepRunner, clocks: VectorClocks, seed: int, device: LazyDevice | None) -> None:
        """`device` is what the steps run on when it is a lazy one; another needs no help to make progress."""
        self._runner = runner
        self._nap = _nothing if device is None else device.nap
        self._clocks = clocks
        self._rng = random.Random(seed)
        self._inbox: deque[ScheduleBatch | CopyOut] = deque()
        self._copies: deque[tuple[int, Event]] = deque()
        """Copies to host memory that were begun."""
        self._landed: deque[int] = deque()
        self._launched: deque[LaunchedStep] = deque()
        self._done: deque[StepResult] = deque()
        self._published: Published | None = None
        self.kinds: set[str] = set()
        if device is not None:
            device.interrupt = self._interrupt

    @property
    def in_flight(self) -> int:
        waiting = sum(isinstance(each, ScheduleBatch) for each in self._inbox)
        return waiting + len(self._launched) + len(self._done)

    @property
    def has_room(self) -> bool:
        return self.in_flight < MAX_DEPTH

    def submit(self, batch: ScheduleBatch) -> None:
        assert self.has_room
        self.kinds |= kinds_of(batch)
        self._clocks.wrote("batch", (batch.step_id,))
        self._clocks.sent(("inbox", batch.step_id))
        self._inbox.append(batch)

    def completed(self) -> list[StepResult]:
        """Let the other threads and the device do something, then take what is done, perhaps nothing."""
        for _ in range(self._rng.randrange(1, 5)):
            self._rng.choice((self._launch, self._launch, self._nap, self._finish, self._land))()
        taken = list(self._done)
        self._done.clear()
        for result in taken:
            self._clocks.received(("done", result.step_id))
            self._clocks.read(RESULTS, (result.step_id,))
        return taken

    def copy_out(self, out: CopyOut) -> None:
        self._clocks.sent(("copy", out.number))
        self._inbox.append(out)

    def host_views(self, copy: HostCopy, start: int = 0) -> list[memoryview]:
        host = self._runner.state.host
        assert host is not None
        return host.views(copy, start)

    def landed(self) -> list[int]:
        taken = list(self._landed)
        self._landed.clear()
        for number in taken:
            self._clocks.received(("landed", number))
        return taken

    def resolve_seq_lens(self, step_id: int) -> Published | None:
        published = self._published
        if published is None or published.step_id != step_id:
            return None
        self._clocks.received(("published", step_id))
        self.kinds.add("resolved lengths")
        return published

    def stop(self) -> None:
        """Nothing runs by itself."""

    def _launch(self) -> None:
        if self._inbox:
            batch = self._inbox.popleft()
            if isinstance(batch, CopyOut):
                self._copy(batch)
                return
            with self._clocks.as_thread(FORWARD_THREAD):
                self._clocks.received(("inbox", batch.step_id))
                self._launched.append(self._runner.launch(batch, _nothing, self._tell))
                self._clocks.sent(("launched", batch.step_id))

    def _copy(self, out: CopyOut) -> None:
        number = out.number
        with self._clocks.as_thread(FORWARD_THREAD):
            self._clocks.received(("copy", number))
            self._copies.append((number, self._runner.copy_out(out)))
            self._clocks.sent(("begun", number))

    def _land(self) -> None:
        """The thread of landings blocks on the oldest copy."""
        if self._copies:
            number, event = self._copies.popleft()
            with self._clocks.as_thread(LANDINGS):
                self._clocks.received(("begun", number))
                event.synchronize()
                self._clocks.sent(("landed", number))
            self._landed.append(number)

    def _tell(self, published: Published) -> None:
        self._clocks.sent(("published", published.step_id))
        self._published = published

    def _interrupt(self) -> None:
        """The waiter does not wait for a launch to end."""
        if self._rng.random() < INTERRUPTIONS:
            with _disable_current_modes():
                self._finish()

    def _finish(self) -> None:
        """The waiter blocks on the oldest step, which is when the device must run."""
        if self._launched:
            launched = self._launched.popleft()
            step_id = launched.batch.step_id
            with self._clocks.as_thread(WAITER):
                self._clocks.received(("launched", step_id))
                self._done.append(launched.result())
                self._clocks.sent(("done", step_id))


def kinds_of(batch: ScheduleBatch) -> set[str]:
    """What a step exercises, by name; a test asserts that its scenario came to what it is for."""
    staged = {"middle chunk": len(batch.sample_indices) < len(batch.rows), "seeded history": batch.history_writes.rows}
    seated = [isinstance(back, Rejoined) for back in batch.host_backs]
    staged["rejoin"], staged["host prefix"] = any(seated), not all(seated)
    return {batch.mode.value, *(name for name, present in staged.items() if present)}


def _nothing() -> None:
    """A device that runs by itself."""
