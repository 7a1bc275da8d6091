"""An engine that shares experts runs its steps and takes part in those of the others, until all of them stop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from core.batch.schedule_batch import ScheduleBatch
from core.executor import joint_thread
from core.executor.joint_thread import JointThread
from tests.support.until import eventually

LEFT = -1


class Runner:
    """Notes what is done; `hold` keeps steps until it is let go of."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.fails: dict[str, BaseException] = {}
        self.hold = threading.Event()
        self.hold.set()

    def _note(self, what: str) -> None:
        self.hold.wait(20)
        self.done.append(what)
        if what in self.fails:
            raise self.fails[what]

    def launch(self, batch: ScheduleBatch, computing: Callable[[], None], published: Any) -> Any:
        self._note(f"step {batch.step_id}")
        computing()
        there = SimpleNamespace(query=lambda: True)
        return SimpleNamespace(copy_done=there, result=lambda: SimpleNamespace(step_id=batch.step_id, error=None))

    def join(self, step: int) -> None:
        self._note(f"join {step}")


class Company:
    """The others, as far as the thread hears of them."""

    def __init__(self) -> None:
        self.others = (1, 2)
        self.left = threading.Event()
        self.gone = False
        self.heard: Callable[[int, int], None]
        self.lost: Callable[[BaseException], None]

    def listen(self, heard: Callable[[int, int], None], lost: Callable[[BaseException], None]) -> None:
        self.heard, self.lost = heard, lost

    def leave(self) -> None:
        if self.gone:
            raise RuntimeError("Connection closed by peer\nand more")
        self.left.set()


def step(number: int) -> ScheduleBatch:
    """A batch, as far as the executor looks at it."""
    batch = object.__new__(ScheduleBatch)
    object.__setattr__(batch, "step_id", number)
    return batch


@pytest.fixture
def runner() -> Runner:
    return Runner()


@pytest.fixture
def company() -> Company:
    return Company()


@pytest.fixture
def thread(runner: Runner, company: Company, monkeypatch: pytest.MonkeyPatch) -> Iterator[JointThread]:
    made = JointThread(cast(Any, runner), runner, company, lambda: None)
    yield made
    monkeypatch.setattr(joint_thread, "LEAVE_SECONDS", 0.0)
    runner.hold.set()
    made.stop()


def results(thread: JointThread, count: int) -> list[Any]:
    found: list[Any] = []
    eventually(lambda: len(found.extend(thread.completed()) or found) >= count)
    return found


def test_steps_of_the_others_come_between_its_own(thread: JointThread, runner: Runner, company: Company) -> None:
    runner.hold.clear()
    thread.submit(step(1))
    company.heard(1, 0)
    thread.submit(step(2))
    company.heard(2, 5)
    runner.hold.set()
    assert [each.step_id for each in results(thread, 2)] == [1, 2]
    eventually(lambda: runner.done == ["step 1", "join 0", "step 2", "join 5"])


def test_a_result_does_not_wait_for_the_steps_of_others(thread: JointThread, runner: Runner, company: Company) -> None:
    runner.hold.clear()
    thread.submit(step(1))
    company.heard(1, 4)
    held = threading.Event()

    def join(number: int) -> None:
        assert held.wait(20), "the result came first"

    runner.join = join  # type: ignore[method-assign]
    runner.hold.set()
    assert results(thread, 1)[0].step_id == 1
    held.set()


def test_an_engine_that_is_lost_ends_this_one(thread: JointThread, runner: Runner, company: Company) -> None:
    company.lost(RuntimeError("connection closed"))
    (failed,) = results(thread, 1)
    assert isinstance(failed.error, RuntimeError)
    company.heard(2, 9)
    thread.stop()
    assert runner.done == []


@pytest.mark.parametrize("where", ["step 1", "join 4"])
def test_what_fails_takes_part_in_nothing_any_more(
    thread: JointThread, runner: Runner, company: Company, where: str
) -> None:
    runner.fails = {where: RuntimeError("an engine is gone")}
    if where == "step 1":
        thread.submit(step(1))
    else:
        company.heard(1, 4)
    assert results(thread, 1)[0].error is runner.fails[where]
    company.heard(1, 5)
    thread.stop()
    assert runner.done == [where] and not company.left.is_set(), "it has not ended as it should"


def test_it_ends_once_all_have_left_and_takes_part_until_then(
    thread: JointThread, runner: Runner, company: Company, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joint_thread, "LEAVE_SECONDS", 60.0)
    company.heard(1, LEFT)
    stopping = threading.Thread(target=thread.stop)
    stopping.start()
    assert company.left.wait(20)
    company.heard(2, 7)
    eventually(lambda: runner.done == ["join 7"])
    assert stopping.is_alive()
    company.heard(2, LEFT)
    stopping.join(20)
    assert not stopping.is_alive()


def test_busy_neighbours_do_not_keep_it(
    runner: Runner, company: Company, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The limit is for all that it still takes part in together."""
    monkeypatch.setattr(joint_thread, "LEAVE_SECONDS", 0.1)
    thread = JointThread(cast(Any, runner), runner, company, lambda: None)
    joined = runner.join

    def join(number: int) -> None:
        joined(number)
        time.sleep(0.01)
        company.heard(1, number + 1)

    runner.join = join  # type: ignore[method-assign]
    company.heard(1, 0)
    thread.stop()
    assert "engines [1, 2] go on without" in caplog.text and len(runner.done) < 30


@pytest.mark.parametrize("gone", [True, False], ids=["gone", "silent"])
def test_it_ends_without_those_that_do_not_leave(
    runner: Runner, company: Company, gone: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(joint_thread, "LEAVE_SECONDS", 0.05)
    company.gone = gone
    thread = JointThread(cast(Any, runner), runner, company, lambda: None)
    company.heard(1, LEFT)
    thread.stop()
    told = "was gone already: Connection closed by peer" if gone else "engines [2] go on without"
    assert told in caplog.text and "and more" not in caplog.text
    assert thread.completed() == []
