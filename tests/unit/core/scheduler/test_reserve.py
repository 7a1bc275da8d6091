"""Pages that are kept free for outputs: of those that stay, and none where a newcomer would be alone."""

from __future__ import annotations

import numpy as np

from tests.unit.core.scheduler.harness import Harness

PAGE = 4


def test_outputs_of_those_that_give_way_need_no_pages() -> None:
    """Each of two requests may put out 40 tokens more, or nearly, and a share of half is kept for that."""
    harness = Harness(rows=4, pages=64, depth=1, max_len=160, cache="none", policy="priority")
    running = [harness.add([1, 2, 3, 4], max_tokens=40, priority=1) for _ in range(2)]
    harness.step()
    harness.step()
    adder = harness.scheduler._planner._adder
    adder._reserve_share = 0.5
    left = adder._remaining = adder._remaining_outputs()
    newcomer, rows = harness.add([9], max_tokens=5, priority=0), np.array([req.row for req in running])
    found = [adder._reserve_pages(newcomer, rows[:leaving]) for leaving in range(3)]
    assert found == [-(-(left + 5) // (2 * PAGE)), -(-(left // 2 + 5) // (2 * PAGE)), 0]
    adder._reserve_share = 0.01
    assert adder._reserve_pages(newcomer) == 1, "a part of a page is one"
