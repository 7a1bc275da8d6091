"""Recurrent states behind drafts: kept until it is known which are right, then one of them is the row's, and no wrong
one is ever found for a page.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from core.device.staging import Staging
from core.invariants import InvariantViolation
from core.memory.kv_allocator import PagedKVAllocator
from core.memory.recurrent.row_to_slot import HybridReqToTokenPool
from core.memory.recurrent.state_pool import MambaPool, StateLayerSpec, StateShape
from core.memory.recurrent.state_slots import StateSlots, StateWrites, Tracked
from core.memory.recurrent.state_snapshots import Tracking
from core.memory.req_to_token_pool import ReqToTokenPool
from core.memory.request_memory import RequestMemory
from core.memory.rows import RowAllocator
from core.memory.seat import Seat
from core.prefix.registry import build_prefix_cache
from core.types.arrays import Ints

CPU = torch.device("cpu")
PAGE, SLOTS, ROOM = 4, 6, 5
LAYERS = (
    StateLayerSpec(0, StateShape((1, 1), torch.int64), StateShape((2,), torch.int64)),
    StateLayerSpec(2, StateShape((1, 1), torch.int64), None),
)


def ints(*values: int) -> Ints:
    return np.array(values, np.int64)


class Device:
    """Rows 1 and 2 in slots 1 and 2; a state is a number, the same in all layers."""

    def __init__(self, room: int = ROOM) -> None:
        self.pool = HybridReqToTokenPool(ReqToTokenPool(4, 16, CPU), MambaPool(LAYERS, SLOTS, CPU, room))
        self._staging = Staging(CPU)
        self.begin(StateWrites(ints(1, 2), ints(1, 2), ints(0, 0)))

    def begin(self, writes: StateWrites | None = None) -> None:
        self.pool.begin(torch.tensor([1, 2]), writes, self._staging)

    def verify(self, lens: Ints, counts: Ints, tracked: Tracked | None = None) -> None:
        """Compute `counts` tokens behind `lens`: the state behind the nth token of row r is 100 r + n."""
        nothing = ints()
        self.begin(None if tracked is None else StateWrites(nothing, nothing, nothing, tracked))
        self.pool.measured(lens, counts, self._staging)
        places = self.pool.verify(counts, self._staging)
        behind = np.concatenate(
            [100 * row + np.arange(start + 1, start + count + 1) for row, start, count in zip((1, 2), lens, counts)]
        )
        self.write(places.slots, torch.from_numpy(behind))

    def judged(self, *counts: int) -> None:
        self.pool.judged(ints(*counts), self._staging)

    def write(self, slots: torch.Tensor, states: torch.Tensor) -> None:
        self.pool.states.scatter(0, slots, states.view(-1, 1, 1), states.view(-1, 1).expand(-1, 2))
        self.pool.states.scatter(2, slots, states.view(-1, 1, 1), None)

    def held(self, *slots: int) -> list[int]:
        found = torch.tensor(slots)
        conv, recurrent = self.pool.states.gather(0, found)
        assert recurrent is not None
        other, _ = self.pool.states.gather(2, found)
        values: list[int] = conv.flatten().tolist()
        assert recurrent.tolist() == [[value, value] for value in values] and other.flatten().tolist() == values
        return values


@pytest.mark.parametrize("first", [1, 2, 3, 4])
@pytest.mark.parametrize("second", [1, 2])
def test_a_row_goes_on_from_the_state_behind_its_last_token_that_counts(first: int, second: int) -> None:
    device = Device()
    device.verify(ints(7, 20), ints(4, 2))
    device.judged(first, second)
    assert device.held(1, 2) == [107 + first, 220 + second]


def test_a_snapshot_is_taken_behind_a_right_draft_and_behind_no_wrong_one() -> None:
    device = Device()
    tracked = Tracked(ints(0, 1), ints(8, 24), ints(3, 4))
    device.write(torch.tensor([3, 4]), torch.tensor([-3, -4]))
    device.verify(ints(6, 21), ints(4, 3), tracked)
    device.judged(3, 2)
    assert device.held(3, 4) == [108, -4], "row 1 has nine tokens now, and row 2 has 23"
    assert device.held(1, 2) == [109, 223]
    device.verify(ints(9, 23), ints(1, 2), tracked)
    device.judged(1, 1)
    assert device.held(3, 4) == [108, 224], "row 2 has come there, and row 1 was there before"


def test_the_last_place_that_counts_may_be_the_end_of_a_page() -> None:
    device = Device()
    device.verify(ints(6, 21), ints(4, 1), Tracked(ints(0), ints(8), ints(3)))
    device.judged(2, 1)
    assert device.held(1, 3) == [108, 108]
    device.verify(ints(7, 23), ints(4, 1), Tracked(ints(0, 1), ints(8, 24), ints(5, 6)))
    device.judged(3, 1)
    assert device.held(1, 5, 6) == [110, 108, 224], "of its newest token, whose slot is the row's own"


def test_a_plain_step_takes_the_snapshots_that_its_rows_reach() -> None:
    device, nothing = Device(), ints()
    device.begin(StateWrites(nothing, nothing, nothing, Tracked(ints(0, 1), ints(8, 24), ints(3, 4))))
    device.pool.measured(ints(7, 24), ints(1, 1), Staging(CPU))
    assert device.pool.tracked.ends.tolist() == [8]
    assert (device.pool.tracked_slots.tolist(), device.pool.tracked_from.tolist()) == ([3], [1])


def test_more_drafts_than_slots_are_a_violation() -> None:
    with pytest.raises(InvariantViolation, match="state_draft_room"):
        Device(room=4).verify(ints(0, 0), ints(3, 4))


class Host:
    """One request that decodes; its plans say between which lengths it is."""

    def __init__(self, slots: int = SLOTS, prompt: int = 6, interval: int = PAGE) -> None:
        self.states = StateSlots(slots, 7, Tracking(PAGE, interval, 2), ROOM)
        cache = build_prefix_cache("radix", PAGE)
        self.memory = RequestMemory(RowAllocator(6), PagedKVAllocator(20, PAGE), cache, 80, [self.states])
        self.seat = self.admit(np.arange(prompt, dtype=np.int64))
        # Pages for all that comes.
        for _ in range(8):
            assert self.memory.grow(ints(self.seat.row))
        self.plan(0, prompt)

    def admit(self, tokens: Ints) -> Seat:
        taken = self.memory.admit(tokens, "", 0)
        assert taken is not None
        return taken

    def plan(self, least: int, count: int, ahead: int = 0) -> list[tuple[int, int]]:
        """(end, slot) of each snapshot of a step behind at least `least` tokens, which may have `ahead` more."""
        args = ints(self.seat.row), ints(least), ints(count), ints(ahead)
        writes = self.memory.plan_companions(*args).get("mamba")
        if writes is None:
            return []
        assert isinstance(writes, StateWrites)
        return list(zip(writes.tracked.ends.tolist(), writes.tracked.slots.tolist(), strict=True))


def test_a_page_end_is_due_in_every_step_that_may_be_the_first_behind_it() -> None:
    host = Host()
    assert host.plan(6, 1) == []
    ((end, slot),) = host.plan(7, 1, 5)
    assert end == 8
    assert host.plan(7, 1, 6) == [(8, slot)]
    assert host.plan(8, 1, 3) == [], "the row is there"
    ((end, other),) = host.plan(10, 1, 5)
    assert end == 16 and other != slot, "12 was within reach while the row could be before 8"


def test_without_drafts_every_page_end_is_kept() -> None:
    host = Host()
    assert [end for length in range(6, 20) for end, _ in host.plan(length, 1)] == [8, 12, 16, 20]


def test_a_snapshot_that_lost_its_slot_is_not_kept_again() -> None:
    host = Host(slots=3)
    ((end, _),) = host.plan(7, 1, 5)
    assert end == 8
    # Two more requests take all slots, those of snapshots too.
    for start in (100, 200):
        host.admit(np.arange(start, start + 3))
    assert host.plan(7, 1, 5) == [], "the row may be behind 8 already"
    host.memory.check_integrity()


def test_a_snapshot_that_found_no_slot_is_not_kept_later() -> None:
    host = Host(slots=3)
    others = [host.admit(np.arange(start, start + 3)) for start in (100, 200)]
    assert host.plan(7, 1, 5) == []
    host.memory.release(others[0].row, others[0].generation, ints())
    assert host.plan(7, 1, 5) == [], "the row may be behind 8 already"
    assert [end for end, _ in host.plan(13, 1, 4)] == [16]


def test_the_newest_snapshot_before_that_is_left(interval: int = 2 * PAGE) -> None:
    """Two buffers: while a snapshot may not be taken yet, the one before is there to resume from."""
    host = Host(interval=interval)
    taken = [host.plan(length, 1, 3) for length in range(6, 40)]
    slots = {end: slot for found in taken for end, slot in found}
    assert sorted(slots) == [8, 16, 24, 32, 40]
    assert all(slots[end] != slots[end + interval] for end in (8, 16, 24, 32))
    kept = host.states._snapshots
    assert {32, 40} == {end for end, slot in slots.items() if slot in set(kept.slots) and end >= 32}


def test_states_behind_drafts_are_no_slots_of_requests() -> None:
    host = Host()
    (pool,) = [each for each in host.memory.stats() if each.name == "mamba"]
    assert pool.capacity == SLOTS and host.memory.draft_room == ROOM
