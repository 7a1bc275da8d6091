"""Steps of engines that share experts: all of them take part in each step of any."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from core.batch.result import Published
from core.batch.schedule_batch import ScheduleBatch
from core.executor.device_state import DeviceState
from core.executor.launched_step import LaunchedStep
from core.executor.step import StepRunner
from core.invariants import check


class Bell(Protocol):
    """See `core.distributed.bells.Bells`."""

    def ring(self, step: int) -> None: ...


class JointRunner(StepRunner):
    """A `StepRunner` that rings for each of its steps, and takes part in those of the others."""

    def __init__(self, state: DeviceState, bell: Bell, idle: Callable[[], None]) -> None:
        """`idle` takes part in a forward pass without rows."""
        super().__init__(state)
        self._bell = bell
        self._idle = idle
        self._joint = 0
        """Number of the next step of all."""

    def launch(
        self,
        batch: ScheduleBatch,
        computing: Callable[[], None] = lambda: None,
        published: Callable[[Published], None] = lambda _: None,
    ) -> LaunchedStep:
        """See `StepRunner`. Raises RuntimeError too, once another engine is gone."""
        self._bell.ring(self._joint)
        self._joint += 1
        return super().launch(batch, computing, published)

    def join(self, step: int) -> None:
        """Take part in `step`, unless a step of this engine was it. Raises RuntimeError once an engine is gone."""
        if step < self._joint:
            return
        check("joint_step", step == self._joint, step=step, expected=self._joint)
        self._joint += 1
        with self._state.streams.on_forward():
            self._idle()
