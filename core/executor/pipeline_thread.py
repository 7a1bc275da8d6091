"""The executor of a pipeline: while a step is with later ranks, this one begins others, of other rows.

With N ranks N steps are begun at a time, and one more is submitted: each rank has a step to compute. Law 10 holds for
each row: a row is in one step that runs and one that is submitted, since the planner deals rows out among the steps
(`core.scheduler.microbatches`). Where it could not, because there are too few rows, steps wait for each other here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from core.batch.result import Published, StepResult
from core.batch.schedule_batch import ScheduleBatch
from core.executor.forward_thread import ForwardThread
from core.executor.interface import MAX_DEPTH
from core.executor.launched_step import LaunchedStep
from core.executor.step import StepRunner
from core.memory.host_moves import CopyOut
from core.types.arrays import Ints


class TwoHalves(Protocol):
    """What runs steps in two halves: see `PipelineLeader`."""

    @property
    def stages(self) -> int: ...

    def begin(self, batch: ScheduleBatch) -> Any: ...

    def end(self, away: Any, published: Callable[[Published], None]) -> LaunchedStep: ...


class PipelineThread(ForwardThread):
    """As `ForwardThread`, over the first rank of a pipeline."""

    def __init__(self, runner: StepRunner, halves: TwoHalves, wake: Callable[[], None]) -> None:
        """`halves` and `runner` are one object, as each side of it is used."""
        self._halves = halves
        self._away: deque[tuple[ScheduleBatch, Any]] = deque()
        super().__init__(runner, wake)

    @property
    def has_room(self) -> bool:
        """Whether `submit` may be called: each rank has a step at most, and one is submitted."""
        return self._in_flight < MAX_DEPTH + self._halves.stages - 1 and not self._stopped

    def _serve(self) -> None:
        failure: BaseException | None = None
        while True:
            # What has come back is ended while nothing else is to be begun; that waits for the last rank.
            if self._away and self._inbox.empty():
                failure = self._end_oldest(failure)
                continue
            if (told := self._inbox.get()) is None:
                break
            if isinstance(told, ScheduleBatch):
                failure = self._begin(told, failure)
            elif isinstance(told, CopyOut):
                if failure is None:
                    self._landings.bring(told.number, self._running.copy_out(told))
            else:
                raise AssertionError("ranks of a pipeline neither exchange weights nor sleep")
        while self._away:
            failure = self._end_oldest(failure)

    def _begin(self, batch: ScheduleBatch, failure: BaseException | None) -> BaseException | None:
        while self._away and (len(self._away) >= self._halves.stages or self._follows(batch)):
            failure = self._end_oldest(failure)
        try:
            if failure is not None:
                raise failure
            self._away.append((batch, self._halves.begin(batch)))
        except BaseException as error:
            while self._away:
                self._end_oldest(error)
            self._completion.bring(StepResult.failed(batch.step_id, error))
            return error
        return None

    def _follows(self, batch: ScheduleBatch) -> bool:
        """Whether `batch` reads what a step that is away is going to write: of a row that decodes, or is another's now.

        Prompts go on without: the next chunk reads keys and values, which each rank has in order.
        """
        begins = np.concatenate([batch.rows[batch.num_extend :], batch.fresh_rows])
        return any(_common(begins, away.rows) for away, _ in self._away)

    def _end_oldest(self, failure: BaseException | None) -> BaseException | None:
        """Deliver the step that was begun first; one that failed fails those behind it."""
        batch, away = self._away.popleft()
        try:
            if failure is not None:
                raise failure
            self._completion.bring(self._halves.end(away, self._fence.publish))
        except BaseException as error:
            self._completion.bring(StepResult.failed(batch.step_id, error))
            return error
        return None


def _common(rows: Ints, others: Ints) -> bool:
    return bool(np.isin(rows, others).any())
