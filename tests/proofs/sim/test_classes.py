"""A request of a higher class behind two of a lower one, on a stage: the rule at work, and the oracle without it."""

from __future__ import annotations

from typing import Any

import pytest

from core.scheduler.preemption import Preemption
from core.types.arrays import Ints
from core.types.request import Req
from tests.proofs.sim.clients import Client
from tests.proofs.sim.stage import Stage
from tests.proofs.sim.story import Violation


def behind_two(stage: Stage) -> tuple[list[Client], Client]:
    low = [stage.add([place, 1], 40, priority=2) for place in range(2)]
    for _ in range(4):
        stage.step()
    return low, stage.add([3], 2, priority=0)


@pytest.mark.parametrize("depth", [1, 2])
def test_the_place_is_taken_and_nothing_is_lost(depth: int) -> None:
    stage = Stage(rows=2, policy="priority", depth=depth)
    low, high = behind_two(stage)
    stage.step()
    assert high.req.row > 0 and [client.by_class for client in low] == [0, 1]
    stage.finish()
    stage.complete(*low, high)


def test_a_wait_behind_a_lower_class_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Preemption, "_candidates", lambda self, newcomer, rows: [])
    stage = Stage(rows=2, policy="priority", depth=1)
    behind_two(stage)
    with pytest.raises(Violation, match="inversion"):
        for _ in range(8):
            stage.step()


def test_that_the_first_of_a_lower_class_gives_way_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeds seldom have two that could."""
    old = Preemption._candidates

    def candidates(self: Preemption, newcomer: Req, rows: Ints) -> list[Req]:
        return sorted(old(self, newcomer, rows), key=self._policy.key)[:1]

    monkeypatch.setattr(Preemption, "_candidates", candidates)
    stage = Stage(rows=2, policy="priority", depth=1)
    behind_two(stage)
    with pytest.raises(Violation, match=r"class: .* and one behind it does not"):
        stage.step()


def test_that_a_request_gives_way_in_vain_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeds seldom have another that holds the rest of the pool."""
    anything: Any = lambda self, leaving, newcomer, reserve: 0  # noqa: E731
    monkeypatch.setattr(Preemption, "_cached_without", anything)
    stage = Stage(rows=3, pages=16, policy="priority", depth=1, cache="none", chunk=64)
    stage.add([1] * 40, 10, priority=0)
    stage.add([2], 10, priority=2)
    for _ in range(3):
        stage.step()
    stage.add([3] * 30, 4, priority=0)
    with pytest.raises(Violation, match="in_vain"):
        stage.step()
