"""The device on the virtual loop: steps take drawn time, come late, fail, hang, and yield NaN.

What a step computes is that of the scheduler's simulation (`tests.proofs.sim.twin_device`): every token is a hash of
what was read through the page table, so the reference of that simulation says what is right here too.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from core.batch.result import StepResult, VectorResult
from core.batch.schedule_batch import ScheduleBatch
from core.memory.request_memory import RequestMemory
from tests.proofs.sim.companions import CompanionSide
from tests.proofs.sim.kv_memory import Table
from tests.proofs.sim.plain import Plain
from tests.proofs.sim.scenario import Scenario
from tests.proofs.sim.shell.loop import VirtualLoop
from tests.proofs.sim.story import Hits, Story
from tests.proofs.sim.twin_device import TwinDevice

HIDDEN = 4
LATE_SHARE, LATE = 0.03, 0.3


def vector(state: int) -> list[float]:
    """What an embedding of a sequence is, given what its last slot holds: never zero."""
    return [float(1 + (state >> (12 * place) & 0xFFF)) for place in range(HIDDEN)]


class ShellDevice(TwinDevice):
    """`core.executor.interface.Executor`; `wake` is called from what would be its thread."""

    def __init__(
        self,
        memory: RequestMemory,
        sides: Sequence[CompanionSide],
        scenario: Scenario,
        story: Story,
        hits: Hits,
        loop: VirtualLoop,
        rng: random.Random,
        wake: Callable[[], None],
    ) -> None:
        super().__init__(memory, sides, scenario, story, hits)
        self.hangs = False
        """The step that runs now, or the next one, never comes back."""
        self._loop, self._rng, self._wake, self._count = loop, rng, wake, hits
        self._slowest = scenario.speed
        self._timer: Any = None
        self._states: list[int] = []

    def submit(self, batch: ScheduleBatch) -> None:
        """See `Executor`."""
        super().submit(batch)
        self._go_on()

    def stop(self) -> None:
        """See `Executor`: what was submitted is finished first."""
        while self.execute_one():
            self.deliver_one()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        super().stop()

    def hurry(self) -> None:
        """The step that runs now is done at this very moment, in the middle of what the loop does."""
        if self._timer is not None and not self.hangs:
            self._timer.cancel()
            self._end()

    def _go_on(self) -> None:
        if self._timer is None and self.queued:
            late = self._rng.random() < LATE_SHARE
            if late:
                self._count("late_step")
            self._timer = self._loop.call_later(self._loop.delay(LATE if late else self._slowest), self._end)

    def _end(self) -> None:
        self._timer = None
        if self.hangs:
            self._count("hung_step")
            return
        if self.execute_one():
            self.deliver_one()
            self._wake()
        self._go_on()

    def _forward(self, plain: Plain, ids: list[int], tables: list[Table]) -> list[int]:
        self._states = super()._forward(plain, ids, tables)
        return self._states

    def _compute(self, batch: ScheduleBatch, plain: Plain) -> StepResult:
        result = super()._compute(batch, plain)
        if batch.pooling is None:
            return result
        held = dict(zip(plain.rows, self._states, strict=True))
        values = np.array([vector(held[row]) for row in batch.pooling.rows.tolist()], np.float32).reshape(-1, HIDDEN)
        return dataclasses.replace(result, vectors=VectorResult(batch.pooling.rows, batch.pooling.generations, values))
