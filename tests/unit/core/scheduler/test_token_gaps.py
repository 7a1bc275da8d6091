"""The time between two tokens is that of the request, whatever rows it had in between."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.unit.core.scheduler.harness import Harness


@pytest.fixture
def gaps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, int, float]]:
    """(request, output position, gap) of every token whose gap reached the histogram, in order."""
    from core.scheduler.tally import Tally

    seen: list[tuple[Any, int, float]] = []
    tokens = Tally.tokens

    def watched(self: Tally, reqs: list[Any], positions: np.ndarray, gaps: np.ndarray, now: float) -> None:
        seen.extend(
            (req, position, gap)
            for req, position, gap in zip(reqs, positions.tolist(), gaps.tolist(), strict=True)
            if position
        )
        tokens(self, reqs, positions, gaps, now)

    monkeypatch.setattr(Tally, "tokens", watched)
    return seen


def recorded(harness: Harness) -> tuple[int, float]:
    stats = harness.scheduler.stats.histograms["inter_token_latency_seconds"]
    return stats.counts[-1], stats.total


def test_a_retraction_is_part_of_the_gap(gaps: list[tuple[Any, int, float]]) -> None:
    """The request loses its row, another one has it for a while, and it comes back to it."""
    harness = Harness(rows=1, policy="priority")
    slow = harness.add([1, 2, 3], max_tokens=6, priority=1)
    while len(harness.seen[slow].tokens) < 3:
        harness.step()
    last = harness.now
    quick = harness.add([4, 5], max_tokens=5, priority=0)
    harness.scheduler._lifecycle.retract(slow)
    while len(harness.seen[slow].tokens) < 4:
        harness.step()
    assert harness.seen[quick].reason is not None, "it had the row meanwhile"
    away = harness.now - last
    assert away > 6
    harness.drain()
    harness.expect(slow)
    harness.expect(quick)
    assert [gap for req, position, gap in gaps if req is slow and position == 3] == [away]
    assert all(gap == 1.0 for req, position, gap in gaps if (req, position) != (slow, 3))
    assert recorded(harness) == (9, away + 8.0)


def test_a_row_tells_its_next_owner_nothing(gaps: list[tuple[Any, int, float]]) -> None:
    """Back in another row, where another request had a token a moment ago."""
    harness = Harness(rows=2, policy="priority")
    first, other = harness.add([1, 2], max_tokens=9), harness.add([3, 4], max_tokens=9)
    while len(harness.seen[first].tokens) < 3 or len(harness.seen[other].tokens) < 3:
        harness.step()
    tokens_at = harness.now
    rows = {first: first.row, other: other.row}
    for req in (first, other):
        harness.scheduler._lifecycle.retract(req)
    harness.step()
    assert rows == {first: other.row, other: first.row} or rows == {first: first.row, other: other.row}
    while len(harness.seen[first].tokens) < 4 or len(harness.seen[other].tokens) < 4:
        harness.step()
    away = harness.now - tokens_at
    assert away > 1.0
    assert [gap for _, position, gap in gaps if position == 3] == [away, away]
    harness.drain()
