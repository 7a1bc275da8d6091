"""The first rank of a pipeline begins steps while others are away, and ends them in the order in which they began."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from core.batch.result import StepResult
from core.batch.schedule_batch import ScheduleBatch
from core.executor.pipeline_thread import PipelineThread
from core.invariants import InvariantViolation
from core.memory.host_moves import CopyOut, HostCopy
from tests.support.until import eventually

STAGES = 2
NONE = np.empty(0, np.int64)


class Halves:
    """Notes what is done; `hold` keeps the first half of a step until it is let go of."""

    def __init__(self, stages: int = STAGES) -> None:
        self.stages = stages
        self.done: list[str] = []
        self.fails: dict[str, BaseException] = {}
        self.hold = threading.Event()
        self.hold.set()

    def _note(self, what: str) -> None:
        self.done.append(what)
        if what in self.fails:
            raise self.fails[what]

    def begin(self, batch: ScheduleBatch) -> int:
        self.hold.wait(20)
        self._note(f"begin {batch.step_id}")
        return batch.step_id

    def end(self, away: int, published: Any) -> Any:
        self._note(f"end {away}")
        there = SimpleNamespace(query=lambda: True)
        return SimpleNamespace(copy_done=there, result=lambda: SimpleNamespace(step_id=away, error=None))

    def copy_out(self, out: CopyOut) -> Any:
        self._note(f"copy {out.number}")
        return SimpleNamespace(synchronize=lambda: None, query=lambda: True)


def step(number: int, decodes: Sequence[int] = (), chunks: Sequence[int] = (), fresh: Sequence[int] = ()) -> Any:
    """A batch, as far as the executor looks at it."""
    batch = object.__new__(ScheduleBatch)
    told = {"step_id": number, "rows": np.array([*chunks, *decodes], np.int64), "num_extend": len(chunks)}
    for name, value in (told | {"fresh_rows": np.array(fresh, np.int64)}).items():
        object.__setattr__(batch, name, value)
    return batch


@pytest.fixture
def halves() -> Halves:
    return Halves()


@pytest.fixture
def thread(halves: Halves) -> Iterator[PipelineThread]:
    made = PipelineThread(cast(Any, halves), halves, lambda: None)
    yield made
    halves.hold.set()
    made.stop()


def submitted(thread: PipelineThread, halves: Halves, *steps: Any) -> list[StepResult]:
    """Submit all before the first begins; returns their results."""
    halves.hold.clear()
    for each in steps:
        thread.submit(each)
    halves.hold.set()
    results: list[StepResult] = []
    eventually(lambda: len(results.extend(thread.completed()) or results) == len(steps))
    return results


def test_a_step_begins_while_the_one_before_is_away(thread: PipelineThread, halves: Halves) -> None:
    results = submitted(thread, halves, step(1, [1]), step(2, [2]), step(3, [1]))
    assert halves.done == ["begin 1", "begin 2", "end 1", "begin 3", "end 2", "end 3"]
    assert [each.step_id for each in results] == [1, 2, 3] and thread.in_flight == 0


@pytest.mark.parametrize(
    ("second", "waits"),
    [
        (step(2, decodes=[2, 1]), True),
        (step(2, decodes=[2], fresh=[1]), True),
        (step(2, decodes=[2], chunks=[1]), False),
        (step(2, chunks=[1], fresh=[3]), False),
    ],
    ids=["decodes", "another's", "chunk beside", "chunk"],
)
def test_a_step_that_reads_what_another_writes_waits_for_it(
    thread: PipelineThread, halves: Halves, second: Any, waits: bool
) -> None:
    submitted(thread, halves, step(1, chunks=[1]), second)
    alone = ["begin 1", "end 1", "begin 2", "end 2"]
    assert halves.done == (alone if waits else ["begin 1", "begin 2", "end 1", "end 2"])


def test_there_is_room_for_a_step_of_each_rank_and_one_more(thread: PipelineThread, halves: Halves) -> None:
    halves.hold.clear()
    for number in range(1, STAGES + 2):
        assert thread.has_room
        thread.submit(step(number, [number]))
    assert not thread.has_room
    with pytest.raises(InvariantViolation, match="executor_depth"):
        thread.submit(step(9, [9]))


@pytest.mark.parametrize("where", ["begin 2", "end 1", "end 2"])
def test_what_fails_fails_all_behind_it(thread: PipelineThread, halves: Halves, where: str) -> None:
    halves.fails = {where: RuntimeError("a rank is gone")}
    results = submitted(thread, halves, step(1, [1]), step(2, [2]), step(3, [3]))
    failed = [each.step_id for each in results if each.error is not None]
    assert [each.step_id for each in results] == [1, 2, 3]
    # A rank that is gone has all that are away fail, also those which began before.
    assert failed == ([2, 3] if where == "end 2" else [1, 2, 3])
    assert "begin 4" not in halves.done and submitted(thread, halves, step(4, [4]))[0].error is not None


@pytest.mark.parametrize("rows", [(1, 2, 1), (1, 2, 2)], ids=["of the first", "of the second"])
def test_of_three_ranks_a_step_waits_for_whichever_has_its_row(rows: tuple[int, int, int]) -> None:
    halves = Halves(3)
    thread = PipelineThread(cast(Any, halves), halves, lambda: None)
    try:
        submitted(thread, halves, *(step(number, [row]) for number, row in enumerate(rows, 1)))
        waits_for = f"end {rows.index(rows[2]) + 1}"
        assert halves.done.index(waits_for) < halves.done.index("begin 3")
    finally:
        thread.stop()


def test_after_a_failure_nothing_is_copied(thread: PipelineThread, halves: Halves) -> None:
    halves.fails = {"begin 1": RuntimeError("a rank is gone")}
    submitted(thread, halves, step(1, [1]))
    thread.copy_out(CopyOut((HostCopy(7, 1, NONE),), NONE))
    assert submitted(thread, halves, step(2, [2]))[0].error is not None
    assert "copy 7" not in halves.done and thread.landed() == []


def test_once_stopped_it_takes_no_steps(thread: PipelineThread) -> None:
    assert thread.has_room
    thread.stop()
    assert not thread.has_room


def test_a_copy_comes_behind_the_steps_that_have_begun(thread: PipelineThread, halves: Halves) -> None:
    halves.hold.clear()
    thread.submit(step(1, [1]))
    thread.copy_out(CopyOut((HostCopy(7, 1, NONE),), NONE))
    thread.submit(step(2, [2]))
    halves.hold.set()
    eventually(lambda: "end 2" in halves.done)
    assert halves.done.index("begin 1") < halves.done.index("copy 7") < halves.done.index("begin 2")
    eventually(lambda: thread.landed() == [7])


def test_what_was_submitted_ends_before_it_stops(thread: PipelineThread, halves: Halves) -> None:
    halves.hold.clear()
    for number in (1, 2, 3):
        thread.submit(step(number, [number]))
    halves.hold.set()
    thread.stop()
    assert [each.step_id for each in thread.completed()] == [1, 2, 3]
