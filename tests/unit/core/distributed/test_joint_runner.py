"""Each step of an engine that shares experts has one number in all engines, and each takes part in it once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from core.distributed.joint_runner import JointRunner
from core.executor.step import StepRunner
from core.invariants import InvariantViolation


class Bell:
    def __init__(self, log: list[Any]) -> None:
        self.log = log

    def ring(self, step: int) -> None:
        self.log.append(("rings", step))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    monkeypatch.setattr(StepRunner, "__init__", lambda self, state: setattr(self, "_state", state))
    monkeypatch.setattr(StepRunner, "launch", lambda self, batch, *told: found.append(("launches", batch, *told)))
    return found


@pytest.fixture
def runner(log: list[Any]) -> JointRunner:
    @contextmanager
    def on_forward() -> Iterator[None]:
        log.append("on the forward stream")
        yield
        log.append("off it")

    state: Any = SimpleNamespace(streams=SimpleNamespace(on_forward=on_forward))
    return JointRunner(state, Bell(log), lambda: log.append("joins"))


def test_it_rings_before_each_step_and_joins_those_of_others_once(runner: JointRunner, log: list[Any]) -> None:
    batch: Any = "a batch"
    computing, published = (lambda: None), (lambda _: None)
    runner.launch(batch, computing, published)
    runner.join(1)
    runner.join(1)
    runner.launch(batch, computing, published)
    runner.join(0)
    runner.join(2)
    runner.join(3)
    step, joined = ("launches", batch, computing, published), ["on the forward stream", "joins", "off it"]
    assert log == [("rings", 0), step, *joined, ("rings", 2), step, *joined]


def test_a_step_that_was_missed_is_noticed(runner: JointRunner) -> None:
    with pytest.raises(InvariantViolation, match="joint_step"):
        runner.join(1)
