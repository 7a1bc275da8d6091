"""Rank 0 of a pipeline tells all ranks of a step before its own part, and ends each by what came back of that one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from core.batch.forward_batch import ForwardBatch
from core.distributed.pipeline_leader import PipelineLeader
from core.executor.computed import Begun, Computed
from core.executor.step import StepRunner
from tests.unit.core.distributed.test_leader import OUT, Group, batch, read


class First:
    """Stands for the model: each step has a number of its own."""

    def __init__(self, log: list[Any]) -> None:
        self.log = log
        self.begun = 0
        self.stage = SimpleNamespace(coming=None)

    def begin(self, inputs: Any) -> int:
        self.begun += 1
        self.stage.coming = self.begun
        self.log.append(("sends", self.begun))
        return self.begun

    def end(self, inputs: Any, coming: int) -> torch.Tensor:
        self.log.append(("waits for", coming))
        return torch.full((2, 9), float(coming))


@pytest.fixture
def log() -> list[Any]:
    return []


@pytest.fixture
def leader(log: list[Any], monkeypatch: pytest.MonkeyPatch) -> PipelineLeader:
    first = First(log)
    inputs = object.__new__(ForwardBatch)
    monkeypatch.setattr("core.distributed.pipeline_leader.FirstStage", First)
    monkeypatch.setattr("core.distributed.pipeline_leader.carried", lambda *_: [])
    monkeypatch.setattr(StepRunner, "__init__", lambda self, state: setattr(self, "_state", state))
    monkeypatch.setattr(StepRunner, "copy_out", lambda self, out: log.append(("copies", out.number)))
    monkeypatch.setattr(StepRunner, "_prepare", lambda *_: (inputs, None, None))
    monkeypatch.setattr(StepRunner, "_read", lambda self, batch, inputs, logits, *_: Computed(inputs, logits))

    def begin(self: Any, step: Any, computing: Any) -> Begun:
        return Begun(step, None, None, self._compute(step, computing), torch.empty(0))  # type: ignore[arg-type]

    monkeypatch.setattr(StepRunner, "_begin", begin)
    monkeypatch.setattr(StepRunner, "_end", lambda self, begun, told: begun)
    state: Any = SimpleNamespace(model=first, streams=SimpleNamespace(on_forward=torch.no_grad))
    made = PipelineLeader(state, Group(log))  # type: ignore[arg-type]  # stand-ins
    made._sampling = None  # type: ignore[assignment]  # nothing samples here
    return made


def test_all_hear_of_steps_and_copies_in_their_order(leader: PipelineLeader, log: list[Any]) -> None:
    leader.begin(batch(1))
    leader_coming: Any = leader._coming
    assert leader_coming is None, "nothing is kept"
    leader.copy_out(OUT)
    leader.begin(batch(2))
    assert log == ["tells", ("sends", 1), "tells", ("copies", 7), "tells", ("sends", 2)]
    group: Any = leader._world
    assert [read(each).step_id for each in (group.messages[0], group.messages[2])] == [1, 2]


def test_a_step_ends_by_what_came_back_of_it(leader: PipelineLeader, log: list[Any]) -> None:
    one, other = leader.begin(batch(1)), leader.begin(batch(2))
    ended: list[Any] = [leader.end(one), leader.end(other)]
    assert [each.batch.step_id for each in ended] == [1, 2]
    assert [each.done.logits[0, 0].item() for each in ended] == [1.0, 2.0]
    assert log[-2:] == [("waits for", 1), ("waits for", 2)]


def test_both_halves_are_one_step_where_nothing_overlaps(leader: PipelineLeader, log: list[Any]) -> None:
    done: Any = leader.launch(batch(3), lambda: log.append("computes"))
    assert done.batch.step_id == 3 and log == ["tells", "computes", ("sends", 1), ("waits for", 1)]
    group: Any = leader._world
    assert leader.stages == group.size
