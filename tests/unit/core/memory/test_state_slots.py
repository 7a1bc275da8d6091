"""Recurrent state slots: taken with row and pages or not at all, cleared for their next owner, given back once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from core.device.staging import Staging
from core.invariants import InvariantViolation
from core.memory.companion import AdmissionFacts
from core.memory.kv_allocator import PagedKVAllocator
from core.memory.recurrent.row_to_slot import HybridReqToTokenPool
from core.memory.recurrent.state_pool import MambaPool, StateLayerSpec, StateShape
from core.memory.recurrent.state_slots import StateSlots, StateWrites
from core.memory.recurrent.state_snapshots import Tracking
from core.memory.req_to_token_pool import ReqToTokenPool
from core.memory.request_memory import RequestMemory
from core.memory.rows import RowAllocator
from core.prefix.registry import build_prefix_cache
from core.types.arrays import Ints

CPU = torch.device("cpu")
LAYERS = (
    StateLayerSpec(0, StateShape((3, 2), torch.float32), StateShape((2, 2), torch.float32)),
    StateLayerSpec(2, StateShape((3, 2), torch.float32), None),
)


def ids(count: int, start: int = 0) -> Ints:
    return np.arange(start, start + count, dtype=np.int64)


def make(slots: int, rows: int = 6, pages: int = 12) -> tuple[StateSlots, RequestMemory]:
    states = StateSlots(slots, rows + 1)
    cache = build_prefix_cache("radix", 4)
    return states, RequestMemory(RowAllocator(rows), PagedKVAllocator(pages, 4), cache, 64, [states])


def plan(memory: RequestMemory, row: int, count: int) -> StateWrites | None:
    writes: StateWrites | None = memory.plan_companions(np.array([row]), np.array([0]), np.array([count])).get("mamba")
    return writes


def test_both_or_neither() -> None:
    states, memory = make(slots=2)
    taken = [memory.admit(ids(4, 10 * n), "", 0) for n in range(3)]
    assert taken[2] is None and taken[0] is not None
    assert (memory.rows.used, memory.allocator.held, states.available) == (2, 2, 0)
    memory.release(taken[0].row, taken[0].generation, ids(0))
    assert states.available == 1 and memory.admit(ids(4, 50), "", 0) is not None
    memory.check_integrity()


def test_no_slot_is_taken_when_pages_do_not_suffice() -> None:
    states, memory = make(slots=2, pages=2)
    assert memory.admit(ids(30), "", 0) is None
    assert states.available == 2
    memory.check_integrity()


def test_slots_leave_in_the_step_that_follows_admission_and_once() -> None:
    states, memory = make(slots=3)
    first = memory.admit(ids(4), "", 0)
    assert first is not None
    writes = plan(memory, first.row, 4)
    assert writes is not None and writes.slots.tolist() == [states.slot_of(first.row)] and 0 not in writes.slots
    assert plan(memory, first.row, 1) is None


def test_an_admission_undone_before_its_step_leaves_nothing() -> None:
    states, memory = make(slots=1)
    first = memory.admit(ids(4), "", 0)
    assert first is not None
    memory.release(first.row, first.generation, ids(0))
    assert states.available == 1 and plan(memory, first.row, 1) is None
    memory.check_integrity()


def test_a_second_release_and_a_slot_with_two_owners_are_violations() -> None:
    states = StateSlots(2, 4)
    states.admitted(1, AdmissionFacts(4, ids(0), 0))
    with pytest.raises(InvariantViolation, match="state_slot_conservation"):
        states.admitted(1, AdmissionFacts(4, ids(0), 0))
    states.released(1)
    with pytest.raises(InvariantViolation, match="state_slot_double_free"):
        states.released(1)
    states.admitted(2, AdmissionFacts(4, ids(0), 0))
    states._slot_of[3] = states.slot_of(2)
    with pytest.raises(InvariantViolation, match="state_slot_conservation"):
        states.check_integrity()


def test_random_histories_conserve_slots() -> None:
    rng = np.random.default_rng(5)
    states, memory = make(slots=3)
    held = []
    for step in range(500):
        taken = memory.admit(ids(int(rng.integers(1, 9)), step * 10), "", 0) if rng.random() < 0.6 else None
        if taken is not None:
            held.append(taken)
        elif held:
            gone = held.pop(int(rng.integers(len(held))))
            memory.release(gone.row, gone.generation, ids(0))
        memory.check_integrity()
        assert states.available == 3 - len(held)


def test_the_mapping_is_as_long_as_the_request_table_whatever_the_states() -> None:
    pool = HybridReqToTokenPool(ReqToTokenPool(9, 16, CPU), MambaPool(LAYERS, 2, CPU))
    assert pool.mapping.shape == (10,)
    pool.begin(torch.tensor([9, 0]), StateWrites(np.array([9]), np.array([2]), np.array([0])), Staging(CPU))
    assert pool.step_slots.tolist() == [2, 0], "the highest row has a slot, the padding row maps to slot 0"


def test_a_fresh_slot_is_cleared_and_its_neighbours_are_not() -> None:
    states = MambaPool(LAYERS, 3, CPU)
    every = torch.tensor([1, 2, 3])
    states.scatter(0, every, torch.ones(3, 3, 2), torch.ones(3, 2, 2))
    states.scatter(2, every, torch.ones(3, 3, 2), None)
    pool = HybridReqToTokenPool(ReqToTokenPool(4, 16, CPU), states)
    pool.begin(torch.tensor([1]), StateWrites(np.array([1]), np.array([2]), np.array([0])), Staging(CPU))
    for layer in (0, 2):
        conv, recurrent = states.gather(layer, every)
        assert conv.sum(dim=(1, 2)).tolist() == [6, 0, 6]
        assert (recurrent is None) == (layer == 2)
        assert recurrent is None or recurrent.sum(dim=(1, 2)).tolist() == [4, 0, 4]


def test_the_state_at_the_last_whole_page_goes_along_and_replaces_zeros() -> None:
    states = StateSlots(4, 7, Tracking(4, 8, 1))
    cache = build_prefix_cache("radix", 4)
    memory = RequestMemory(RowAllocator(6), PagedKVAllocator(12, 4), cache, 64, [states])
    seat = memory.admit(ids(9), "", 0)
    assert seat is not None and states.slots_for(2) == 1
    pages = memory.pages_of(seat.row, 8)
    assert states.leaves(pages) is None, "nothing was computed"
    plan(memory, seat.row, 9)
    slots = states.leaves(pages)
    assert slots is not None and slots.tolist() != [states.slot_of(seat.row)] and len(slots) == 1
    assert states.leaves(pages[:1]) is None, "there is none at that place"
    other = memory.admit(ids(9, 50), "", 0)
    assert other is not None
    into = states.resumes(other.row, memory.pages_of(other.row, 8))
    assert into.tolist() == [states.slot_of(other.row)]
    memory.check_integrity()
