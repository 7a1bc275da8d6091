"""Recurrent states kept for pages: they outlive their row, go with their page, and give way to running requests."""

from __future__ import annotations

import numpy as np
import torch

from core.memory.kv_allocator import PagedKVAllocator
from core.memory.recurrent.state_pool import MambaPool, StateLayerSpec, StateShape
from core.memory.recurrent.state_slots import StateSlots, StateWrites
from core.memory.recurrent.state_snapshots import Tracking
from core.memory.request_memory import RequestMemory
from core.memory.rows import RowAllocator
from core.memory.seat import Seat
from core.prefix.registry import build_prefix_cache
from core.types.arrays import Ints

PAGE = 4


def ids(count: int, start: int = 0) -> Ints:
    return np.arange(start, start + count, dtype=np.int64)


def make(slots: int, pages: int = 12, buffers: int = 2) -> tuple[StateSlots, RequestMemory]:
    states = StateSlots(slots, 7, Tracking(PAGE, PAGE, buffers))
    cache = build_prefix_cache("radix", PAGE)
    return states, RequestMemory(RowAllocator(6), PagedKVAllocator(pages, PAGE), cache, 64, [states])


def plan(memory: RequestMemory, row: int, start: int, count: int) -> StateWrites:
    writes = memory.plan_companions(np.array([row]), np.array([start]), np.array([count]))["mamba"]
    assert isinstance(writes, StateWrites)
    return writes


def admit(memory: RequestMemory, tokens: Ints) -> Seat:
    taken = memory.admit(tokens, "", 0)
    assert taken is not None
    return taken


def serve(memory: RequestMemory, tokens: Ints) -> StateWrites:
    """One request, its prompt in one step, and its end."""
    taken = admit(memory, tokens)
    writes = plan(memory, taken.row, taken.cached_tokens, len(tokens) - taken.cached_tokens)
    memory.release(taken.row, taken.generation, tokens)
    memory.check_integrity()
    return writes


def test_a_prompt_leaves_the_state_of_its_last_boundary_behind() -> None:
    states, memory = make(slots=3)
    writes = serve(memory, ids(10))
    assert writes.sources.tolist() == [0] and writes.tracked.ends.tolist() == [8]
    (kept,) = writes.tracked.slots.tolist()
    second = admit(memory, ids(11))
    assert second.cached_tokens == 8
    assert plan(memory, second.row, 8, 3).sources.tolist() == [kept], "the new slot becomes a copy"
    assert states.slot_of(second.row) != kept
    pool = {stats.name: stats for stats in memory.stats()}["mamba"]
    assert (pool.used, pool.cached, pool.free) == (1, 1, 1)
    memory.check_integrity()


def test_a_boundary_is_met_in_the_chunk_that_contains_it() -> None:
    _, memory = make(slots=3)
    taken = admit(memory, ids(15))
    assert not len(plan(memory, taken.row, 0, 6).tracked.places)
    assert plan(memory, taken.row, 6, 9).tracked.ends.tolist() == [12]


def test_a_whole_page_prompt_keeps_what_its_own_repetition_needs() -> None:
    _, memory = make(slots=3)
    serve(memory, ids(8))
    assert admit(memory, ids(8)).cached_tokens == 4


def test_the_state_of_a_twin_goes_on_for_the_page_that_the_cache_has() -> None:
    _, memory = make(slots=6)
    longer, twin = admit(memory, ids(14)), admit(memory, ids(10))
    assert plan(memory, longer.row, 0, 14).tracked.ends.tolist() == [12]
    (kept,) = plan(memory, twin.row, 0, 10).tracked.slots.tolist()
    memory.release(longer.row, longer.generation, ids(14))
    memory.release(twin.row, twin.generation, ids(10))
    memory.check_integrity()
    again = admit(memory, ids(10))
    assert again.cached_tokens == 8, "the cache has the page from the longer prompt, which kept nothing there"
    assert plan(memory, again.row, 8, 2).sources.tolist() == [kept]


def test_a_twin_does_not_replace_what_is_kept_already() -> None:
    states, memory = make(slots=6)
    twins = [admit(memory, ids(10)) for _ in range(2)]
    slots = [int(plan(memory, twin.row, 0, 10).tracked.slots[0]) for twin in twins]
    for twin in twins:
        memory.release(twin.row, twin.generation, ids(10))
        memory.check_integrity()
    assert list(states._snapshots.slots) == slots[:1] and states.available == 6


def test_where_prompts_part_a_state_is_kept_for_the_next() -> None:
    _, memory = make(slots=8, pages=24)
    shared = ids(10)
    one, two, three = (np.concatenate((shared, ids(9, 100 * n))) for n in (1, 2, 3))
    assert serve(memory, one).tracked.ends.tolist() == [16]
    taken = admit(memory, two)
    assert taken.cached_tokens == 0, "nothing is kept where they part"
    writes = plan(memory, taken.row, 0, 19)
    assert writes.tracked.places.tolist() == [0, 0] and writes.tracked.ends.tolist() == [8, 16]
    memory.release(taken.row, taken.generation, two)
    assert admit(memory, three).cached_tokens == 8
    memory.check_integrity()


def test_where_prompts_part_is_met_in_a_chunk_of_its_own() -> None:
    _, memory = make(slots=8, pages=24)
    serve(memory, ids(19))
    taken = admit(memory, np.concatenate((ids(10), ids(9, 100))))
    assert plan(memory, taken.row, 0, 7).tracked.ends.tolist() == []
    assert plan(memory, taken.row, 7, 5).tracked.ends.tolist() == [8]
    assert plan(memory, taken.row, 12, 7).tracked.ends.tolist() == [16]


def test_a_snapshot_goes_with_its_page() -> None:
    states, memory = make(slots=4, pages=4)
    serve(memory, ids(10))
    serve(memory, ids(16, 100))
    assert states.available == 4 and memory.admit(ids(10), "", 0) is not None
    assert len(states._snapshots) <= 1, "evicted pages kept their snapshots"
    memory.check_integrity()


def test_snapshots_give_way_to_requests_the_least_recently_used_first() -> None:
    _, memory = make(slots=3)
    serve(memory, ids(6))
    serve(memory, ids(6, 50))
    first = admit(memory, ids(6))
    assert first.cached_tokens == 4
    assert admit(memory, ids(6, 100)).cached_tokens == 0, "takes the slot of the snapshot behind 50"
    memory.release(first.row, first.generation, ids(0))
    assert admit(memory, ids(6, 50)).cached_tokens == 0
    assert admit(memory, ids(6)).cached_tokens == 4
    memory.check_integrity()


def test_the_only_slot_is_moved_to_the_request_that_needs_its_snapshot() -> None:
    _, memory = make(slots=1)
    taken = admit(memory, ids(6))
    assert not len(plan(memory, taken.row, 0, 4).tracked.places), "no slot is left to keep anything in"
    memory.release(taken.row, taken.generation, ids(0))
    _, memory = make(slots=2)
    serve(memory, ids(6))
    blocker = admit(memory, ids(6, 50))
    second = admit(memory, ids(6))
    writes = plan(memory, second.row, 4, 2)
    assert blocker.row != second.row and second.cached_tokens == 4
    assert writes.sources.tolist()[1] == writes.slots.tolist()[1] != 0
    memory.check_integrity()


def test_decode_takes_turns_and_what_is_kept_outlives_the_row() -> None:
    states, memory = make(slots=8, buffers=2)
    taken = admit(memory, ids(24))
    plan(memory, taken.row, 0, 3)
    states._marks[taken.row] = 0
    turns = [int(plan(memory, taken.row, end - 1, 1).tracked.slots[0]) for end in (4, 8, 12, 16, 20)]
    assert turns[0] == turns[2] == turns[4] and turns[1] == turns[3] and turns[0] != turns[1]
    memory.release(taken.row, taken.generation, ids(18))
    memory.check_integrity()
    assert len(states._snapshots) == 1, "the page behind the last known token is freed, and its state with it"
    assert admit(memory, ids(24)).cached_tokens == 16, "the state before the last is whole"


def test_what_others_began_behind_is_not_overwritten_when_a_turn_is_over() -> None:
    states, memory = make(slots=8, buffers=1)
    maker = admit(memory, ids(24))
    states._marks[maker.row] = 0
    (shared,) = plan(memory, maker.row, 3, 1).tracked.slots.tolist()
    memory.offer(maker.row, ids(4))
    other = admit(memory, np.append(ids(4), ids(4, 100)))
    assert other.cached_tokens == 4
    assert plan(memory, other.row, 4, 4).sources.tolist() == [shared]
    turns = [int(plan(memory, maker.row, end - 1, 1).tracked.slots[0]) for end in (8, 12)]
    assert shared not in turns and turns[0] == turns[1], "its own it overwrites"
    assert states.resumable(memory._pages[other.row, :1]) == 1, "it could be resumed there, were it to give way"
    memory.check_integrity()


def test_random_histories_conserve_slots() -> None:
    rng = np.random.default_rng(seed := 7)
    _, memory = make(slots=6, pages=24)
    held: list[tuple[Seat, Ints]] = []
    hits = 0
    for _ in range(600):
        tokens = ids(int(rng.integers(1, 20)), int(rng.integers(3)) * 100)
        taken = memory.admit(tokens, "", 0) if len(held) < 3 and rng.random() < 0.6 else None
        if taken is not None:
            hits += taken.cached_tokens > 0
            rest = len(tokens) - taken.cached_tokens
            memory.plan_companions(np.array([taken.row]), np.array([taken.cached_tokens]), np.array([rest]))
            held.append((taken, tokens))
        elif held:
            gone, tokens = held.pop(int(rng.integers(len(held))))
            memory.release(gone.row, gone.generation, tokens)
        memory.check_integrity()
    assert hits > 60, f"seed {seed}"


def test_sources_are_read_before_slots_are_written_and_padding_is_no_source_of_zeros() -> None:
    pool = MambaPool((StateLayerSpec(0, StateShape((1, 1), torch.float32), None),), 3, torch.device("cpu"))
    pool.scatter(0, torch.arange(4), torch.tensor([9.0, 1.0, 2.0, 3.0]).view(4, 1, 1), None)
    pool.start(torch.tensor([1, 2, 3]), torch.tensor([2, 0, 3]))
    assert pool.gather(0, torch.arange(1, 4))[0].flatten().tolist() == [2, 0, 3]
