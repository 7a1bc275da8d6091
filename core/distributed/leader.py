"""Rank 0: whatever its forward thread is told to run, it has all ranks run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from core.batch.result import Published
from core.batch.schedule_batch import HistoryWrites, ScheduleBatch
from core.device.event import Event
from core.distributed.wire import encode
from core.distributed.world import World
from core.executor.device_state import DeviceState
from core.executor.launched_step import LaunchedStep
from core.executor.step import StepRunner
from core.memory.host_moves import CopyOut


class LeadingRunner(StepRunner):
    """A `StepRunner` that tells every step, and every copy to host memory, to the others before it launches it."""

    def __init__(self, state: DeviceState, world: World) -> None:
        """All ranks make theirs at once: what is run before the first step has collectives too."""
        super().__init__(state)
        self._world = world

    def launch(
        self,
        batch: ScheduleBatch,
        computing: Callable[[], None] = lambda: None,
        published: Callable[[Published], None] = lambda _: None,
    ) -> LaunchedStep:
        """See `StepRunner`. Raises RuntimeError too, once a rank is gone: no step can be trusted any more."""
        # Before it is launched, which consumes what is staged.
        self._world.send(encode(plain(batch)))
        return super().launch(batch, computing, published)

    def copy_out(self, out: CopyOut) -> Event:
        """See `StepRunner`: each rank copies its own heads."""
        self._world.send(encode(out))
        return super().copy_out(out)


def plain(batch: ScheduleBatch) -> ScheduleBatch:
    """`batch` without what only the leader has use for: it alone samples and drafts, and tells the others."""
    spec = None if batch.spec is None else replace(batch.spec, seeds=())
    return replace(batch, grammar_seeds=(), history_writes=HistoryWrites(), spec=spec)
