"""A row whose input violates a device check is named in the result of that very step, launched or replayed."""

from __future__ import annotations

import pytest
import torch

from core.batch.result import StepResult
from core.device.streams import DeviceStreams
from core.relay.payload import RelayPayload
from tests.unit.core.executor.test_decode_graphs import World


def world(captured: bool) -> World:
    return World() if captured else World(DeviceStreams(torch.device("cpu")))


def result(world: World, rows: list[int]) -> StepResult:
    """One decode step of `rows`."""
    world.steps += 1
    found = world.runner.launch(world.batch(rows)).result()
    world.lens[rows] += 1
    return found


@pytest.mark.parametrize("captured", [True, False])
def test_an_unwritten_token_marks_its_row(captured: bool) -> None:
    found = world(captured)
    found.start([1, 2, 5], [3, 4, 5], 4)
    assert result(found, [1, 2, 5]).violated is None
    found.map.forget(torch.tensor([2], device=found.streams.device))
    found.map.publish(torch.tensor([2], device=found.streams.device), torch.tensor([5], device=found.streams.device))
    hit = result(found, [1, 2, 5])
    assert hit.violated is not None and hit.violated.tolist() == [False, True, False]
    assert hit.assert_counts.tolist() == [1, 0] and not hit.non_finite.any()
    after = result(found, [1, 2, 5])
    assert after.violated is None and after.assert_counts.tolist() == [1, 0], "the count stays, the mark does not"


@pytest.mark.parametrize("captured", [True, False])
def test_another_length_marks_its_row(captured: bool) -> None:
    found = world(captured)
    found.start([1, 2, 5, 6], [3, 4, 5, 6], 4)
    device = found.streams.device
    found.map.publish(torch.tensor([1, 6], device=device), torch.tensor([3, 9], device=device))
    hit = result(found, [1, 2, 5, 6])
    assert hit.violated is not None and hit.violated.tolist() == [True, False, False, True]
    assert hit.assert_counts.tolist() == [0, 2]
    assert result(found, [1, 2, 5, 6]).violated is None


@pytest.mark.parametrize("captured", [True, False])
def test_both_at_once_are_one_mark(captured: bool) -> None:
    """In three steps of different sizes, so that a mark of a larger one would be left over."""
    found = world(captured)
    rows = [1, 2, 3, 4, 5, 6]
    found.start(rows, [1] * 6, 4)
    device = found.streams.device
    found.map.forget(torch.tensor(rows, device=device))
    hit = result(found, rows)
    assert hit.violated is not None and hit.violated.all() and hit.assert_counts.tolist() == [6, 6]
    found.map.stash(torch.tensor([1, 2, 3], device=device), RelayPayload(torch.tensor([1, 1, 1], device=device)))
    assert result(found, [1, 2, 3]).violated is None
