"""What a companion can hold of all drafts of a step is shared by the rows of the step."""

from __future__ import annotations

import pytest

from core.memory.recurrent.state_slots import StateSlots
from tests.support.fakes.speculating_executor import always_right
from tests.unit.core.scheduler.test_speculation import MOST, harness


@pytest.mark.parametrize(("room", "widest"), [(None, MOST), (9, 3), (3, 1), (2, 0)])
def test_rows_share_the_room_for_what_drafts_leave(room: int | None, widest: int) -> None:
    """Three rows that each could verify more."""
    states = StateSlots(8, 9, None, 0 if room is None else room)
    world = harness(always_right, companions=() if room is None else (states,))
    reqs = [world.add(range(1 + i, 8 + 3 * i), max_tokens=24) for i in range(3)]
    world.drain()
    for req in reqs:
        world.expect(req)
    together = [batch.spec.drafts for batch in world.executor.batches if batch.num_decode == 3]
    assert max(int(drafts.max()) for drafts in together) == widest
    assert room is None or max(int(drafts.sum()) for drafts in together) <= room
