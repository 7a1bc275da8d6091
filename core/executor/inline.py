"""The executor without overlap: the same step, run to its end inside `submit` (law 8)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from core.batch.result import Published, StepResult
from core.batch.schedule_batch import ScheduleBatch
from core.executor.landings import Landings
from core.executor.step import StepRunner
from core.invariants import check
from core.memory.host_moves import CopyOut, HostCopy


class InlineExecutor:
    """Depth one. `submit` blocks for the whole step: for comparison with overlap, and for tests."""

    def __init__(self, runner: StepRunner, wake: Callable[[], None]) -> None:
        self._runner: StepRunner | None = runner
        self._wake = wake
        self._landings = Landings(wake)
        self._done: deque[StepResult] = deque()
        self._stopped = False

    @property
    def in_flight(self) -> int:
        """1 between `submit` and the next `completed`."""
        return len(self._done)

    @property
    def has_room(self) -> bool:
        """Whether the last result was taken, and `stop` was not called."""
        return not self._done and not self._stopped

    def submit(self, batch: ScheduleBatch) -> None:
        """Run the step now and keep its result, or its error, for `completed`. Raises InvariantViolation without room.

        A KeyboardInterrupt passes through: it ends the process, not the step.
        """
        check("executor_depth", self.has_room, in_flight=self.in_flight, stopped=self._stopped)
        try:
            result = self._running.launch(batch).result()
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            result = StepResult.failed(batch.step_id, error)
        self._done.append(result)
        self._wake()

    def copy_out(self, out: CopyOut) -> None:
        """See `HostCopies`."""
        self._landings.bring(out.number, self._running.copy_out(out))

    def renew(self, runner: StepRunner | None) -> Future[None]:
        """See `Renewable`."""
        check("executor_renewal", not self._done, in_flight=self.in_flight)
        self._runner, taken = runner, Future[None]()
        taken.set_result(None)
        return taken

    @property
    def _running(self) -> StepRunner:
        assert self._runner is not None, "nothing is submitted while the engine sleeps"
        return self._runner

    def host_views(self, copy: HostCopy, start: int = 0) -> Sequence[memoryview]:
        """See `HostCopies`."""
        host = self._running.state.host
        assert host is not None, "the scheduler copies where there is room"
        return host.views(copy, start)

    def landed(self) -> list[int]:
        """See `HostCopies`."""
        return self._landings.take()

    def completed(self) -> list[StepResult]:
        """The result of the last step, once."""
        results = list(self._done)
        self._done.clear()
        return results

    def resolve_seq_lens(self, step_id: int) -> Published | None:
        """None: a step is planned when the results of the one before were taken, which say it all."""
        return None

    def stop(self) -> None:
        """Take no more steps."""
        self._stopped = True
        self._landings.stop()
