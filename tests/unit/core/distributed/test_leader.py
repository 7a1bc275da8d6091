"""The leader tells before it launches, and only what others have use for; followers run what they are told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from core.batch.build import Segment
from core.batch.schedule_batch import HistoryWrites, ScheduleBatch
from core.distributed.follower import FollowingSampling, follow
from core.distributed.leader import LeadingRunner
from core.distributed.wire import decode, encode
from core.executor.step import StepRunner
from core.memory.host_moves import CopyOut, HostCopy
from core.memory.req_to_token_pool import TableWrites
from tests.unit.core.batch.test_schedule_batch import step
from tests.unit.core.sampling.batches import Row, batch_of

OUT = CopyOut((HostCopy(7, 2, np.array([1])),), np.array([3, 4]))


def batch(number: int) -> ScheduleBatch:
    """A prompt that goes on, and two rows that decode."""
    made = step([Segment(4, 8, np.arange(3), final=False)], [9, 1], [20, 30])
    writes = TableWrites(np.array([4]), np.array([2]), np.array([11]), 4)
    return replace(made, step_id=number, table_writes=writes, sampling=batch_of([Row([0.0]), Row([0.0])]))


def read(data: bytes) -> Any:
    return decode(np.frombuffer(bytearray(data), np.uint8).data, torch.clone)


class Group:
    """Notes what is said, and says what was noted."""

    size = 3

    def __init__(self, log: list[Any]) -> None:
        self.log = log
        self.messages: list[bytes] = []

    def send(self, data: bytes) -> None:
        self.log.append("tells")
        self.messages.append(data)

    def receive(self) -> memoryview:
        return np.frombuffer(bytearray(self.messages.pop(0)), np.uint8).data if self.messages[0] else memoryview(b"")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    monkeypatch.setattr(StepRunner, "__init__", lambda self, state: None)
    monkeypatch.setattr(StepRunner, "launch", lambda self, batch, *_: found.append(("launches", batch)))
    monkeypatch.setattr(StepRunner, "copy_out", lambda self, out: found.append(("copies", out)))
    return found


def test_all_hear_of_a_step_before_it_is_launched(log: list[Any]) -> None:
    group, made = Group(log), batch(1)
    seeded = replace(made, history_writes=HistoryWrites((1,), (np.array([5]),)), grammar_seeds=("a live matcher",))
    LeadingRunner(None, group).launch(seeded)  # type: ignore[arg-type]  # stand-ins
    assert log == ["tells", ("launches", seeded)], "the leader itself has all of it"
    told = read(group.messages[0])
    assert isinstance(told, ScheduleBatch) and told.step_id == made.step_id
    assert told.grammar_seeds == () and told.history_writes.rows == ()


def test_all_hear_of_a_copy_to_host_memory(log: list[Any]) -> None:
    group = Group(log)
    LeadingRunner(None, group).copy_out(OUT)  # type: ignore[arg-type]  # stand-ins
    assert log == ["tells", ("copies", OUT)] and read(group.messages[0]).number == OUT.number


def test_a_follower_runs_what_it_is_told_to_the_end(log: list[Any]) -> None:
    group = Group(log)
    group.messages = [encode(batch(1)), encode(OUT), encode(batch(2)), b"", encode(batch(3))]
    follow(StepRunner(None), group, torch.clone)  # type: ignore[arg-type]  # stand-ins
    assert [what for what, _ in log] == ["launches", "copies", "launches"]
    assert [told.step_id for what, told in log if what == "launches"] == [1, 2] and log[1][1].number == 7


def test_a_follower_leaves_room_for_tokens() -> None:
    sampling = FollowingSampling()
    found = sampling.sample(torch.ones(3, 9), batch(1), torch.tensor([4, 5, 6]))
    assert found.output.tokens.tolist() == [0, 0, 0] and found.output.tokens.dtype == torch.int64
    assert not found.output.non_finite.any() and found.output.logprobs is None
    assert sampling.carried(batch(1)) == []
