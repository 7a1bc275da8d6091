"""What the scheduler sees of execution: submit a frozen batch, collect results in order. Nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from core.batch.result import Published, StepResult
from core.batch.schedule_batch import ScheduleBatch
from core.memory.host_moves import CopyOut, HostCopy

if TYPE_CHECKING:
    from core.executor.step import StepRunner

MAX_DEPTH = 2
"""One step running and one submitted (law 10). With more, a request would run further past its end."""


@runtime_checkable
class HostCopies(Protocol):
    """An executor that copies keys and values to host memory. All methods belong to the loop thread."""

    def copy_out(self, out: CopyOut) -> None:
        """Begin a copy behind all steps submitted so far, and before those submitted later. Never waits."""
        ...

    def host_views(self, copy: HostCopy, start: int = 0) -> Sequence[memoryview]:
        """The bytes of tokens [start, tokens) of a copy: see `HostArena.views`."""
        ...

    def landed(self) -> list[int]:
        """Numbers of copies that are in host memory since the last call; the loop is woken for each.

        Raises the error after which none is told any more: a lost device, say.
        """
        ...


@runtime_checkable
class Renewable(Protocol):
    """An executor that can go on with other weights, or lend the memory of its own. Loop thread only."""

    def renew(self, runner: StepRunner | None) -> Future[None]:
        """Run later steps by `runner`; None: there are none until the next call. Raises InvariantViolation in flight.

        The future is done once nothing here refers to the runner of before, nor to its last step.
        """
        ...


class Executor(Protocol):
    """Runs steps one after another in submission order. All methods belong to the loop thread."""

    @property
    def in_flight(self) -> int:
        """Batches submitted whose results `completed` has not returned yet."""
        ...

    @property
    def has_room(self) -> bool:
        """Whether `submit` may be called."""
        ...

    def submit(self, batch: ScheduleBatch) -> None:
        """Queue a step. Raises InvariantViolation without room; it never waits."""
        ...

    def completed(self) -> list[StepResult]:
        """Results that arrived since the last call, oldest first; a failed step is a result with `error` set."""
        ...

    def resolve_seq_lens(self, step_id: int) -> Published | None:
        """How far step `step_id`, the newest one submitted, has brought its rows; None before its publish event.

        For a step that may verify drafts. Never waits. After None the loop is woken when the event has fired, which is
        before the step has made new drafts and before its results are here. Of a grid the lengths come with the
        results, which wake the loop as well.
        """
        ...

    def stop(self) -> None:
        """Finish what was submitted and end the threads. Idempotent."""
        ...
