"""Window pages: held while some row's window reaches them, then there for whoever needs room, never lacking."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch

from core.device.staging import Staging
from core.invariants import InvariantViolation
from core.memory.companion import AdmissionFacts
from core.memory.kv_allocator import PagedKVAllocator
from core.memory.kv_pool import KVLayerSpec, KVPool
from core.memory.request_memory import RequestMemory
from core.memory.rows import RowAllocator
from core.memory.seat import Seat
from core.memory.window.window_bounds import WindowBounds
from core.memory.window.window_pages import NAME, WindowPages, WindowWrites
from core.memory.window.window_pool import SlidingWindowPool
from core.prefix.registry import build_prefix_cache
from core.types.arrays import Ints

CPU = torch.device("cpu")
PAGE, WINDOW, CHUNK = 4, 8, 16
BOUNDS = WindowBounds(WINDOW, PAGE, CHUNK)


def ids(count: int, start: int = 0) -> Ints:
    return np.arange(start, start + count, dtype=np.int64)


def make(size: int, pages: int = 60, bounds: WindowBounds = BOUNDS) -> tuple[WindowPages, RequestMemory]:
    windows = WindowPages(size, pages, 7, bounds)
    cache = build_prefix_cache("radix", bounds.page_size)
    return windows, RequestMemory(RowAllocator(6), PagedKVAllocator(pages, bounds.page_size), cache, 200, [windows])


def admit(memory: RequestMemory, tokens: Ints) -> Seat:
    taken = memory.admit(tokens, "", 0)
    assert taken is not None
    return taken


def plan(memory: RequestMemory, row: int, start: int, count: int) -> WindowWrites | None:
    memory.check_integrity()
    writes: WindowWrites | None = memory.plan_companions(*(np.array([n]) for n in (row, start, count))).get(NAME)
    memory.check_integrity()
    return writes


def prefill(memory: RequestMemory, tokens: Ints, chunk: int = CHUNK) -> Seat:
    """Admit and compute in chunks, offering what is planned as the planner does."""
    taken = admit(memory, tokens)
    for start in range(taken.cached_tokens, len(tokens), chunk):
        end = min(start + chunk, len(tokens))
        memory.offer(taken.row, tokens[:end])
        plan(memory, taken.row, start, end - start)
    return taken


def decode(memory: RequestMemory, row: int, position: int) -> bool:
    """One step that computes the token at `position`; False when there is no page for it."""
    rows, place = np.array([row]), np.array([position])
    if memory.needs_page(rows, place)[0] and not memory.grow(rows):
        return False
    plan(memory, row, position, 1)
    return True


@pytest.mark.parametrize(("page", "window", "chunk"), [*itertools.product((1, 2, 4), (1, 2, 3, 7, 8), (1, 2, 5, 8))])
def test_the_bounds_are_reached_and_never_passed(page: int, window: int, chunk: int) -> None:
    """Against all chunks at all places, by counting."""
    bounds = WindowBounds(window, page, chunk)
    held = {
        count: max(-(-(p + count) // page) - int(bounds.first_places(np.array([p]))[0]) for p in range(40))
        for count in range(1, chunk + 1)
    }
    assert max(held.values()) <= bounds.alone <= max(held.values()) + 1
    assert all(pages <= bounds.per_row + (count - 1) // page for count, pages in held.items())
    for p in range(40):
        first = int(bounds.first_places(np.array([p]))[0]) * page
        assert first <= max(0, p - window + 1) < first + page or first == p == 0


def test_a_long_request_holds_its_window_only_and_passes_its_pages_on() -> None:
    windows, memory = make(size=BOUNDS.alone)
    taken = prefill(memory, ids(64))
    used = [windows.stats()[0].used]
    for position in range(64, 160):
        assert decode(memory, taken.row, position)
        used.append(windows.stats()[0].used)
    assert max(used) <= BOUNDS.per_row - 1, "at rest"
    assert memory.allocator.held == 40 and windows.size == 7
    memory.release(taken.row, taken.generation, ids(0))
    memory.check_integrity()


def test_what_one_row_passed_stays_while_another_needs_it() -> None:
    windows, memory = make(size=20)
    prompt = ids(20)
    first = prefill(memory, prompt)
    second = admit(memory, ids(21))
    assert second.cached_tokens == 20
    shared = [int(page) for page in memory._pages[second.row, 3:5]]
    before = [windows.window_of(page) for page in shared]
    assert all(before)
    for position in range(20, 60):
        assert decode(memory, first.row, position)
    third = prefill(memory, ids(60, 1000))
    assert [windows.window_of(page) for page in shared] == before, "given away under a row that will read it"
    plan(memory, second.row, 20, 1)
    for taken in (first, second, third):
        memory.release(taken.row, taken.generation, ids(0))
    assert windows.stats()[0].used == 0
    memory.check_integrity()


def test_a_prefix_is_resumed_where_its_last_window_is_whole() -> None:
    windows, memory = make(size=40)
    taken = prefill(memory, ids(41))
    pages = memory._pages[taken.row, :10].copy()
    memory.release(taken.row, taken.generation, ids(40))
    assert [windows.resumable(pages[:k]) for k in (10, 5, 1, 0)] == [10, 5, 1, 0]
    windows._free.append(windows._forget(int(pages[4])))
    found = [windows.resumable(pages[:k]) for k in range(11)]
    # Behind page 4 and one more, a query still reaches into page 4; behind two more it does not.
    assert found == [0, 1, 2, 3, 4, 4, 4, 7, 8, 9, 10]
    again = admit(memory, ids(25))
    assert again.cached_tokens == 16
    memory.check_integrity()


def test_a_prefix_that_lost_its_window_is_whole_again_when_computed_again() -> None:
    windows, memory = make(size=BOUNDS.alone, pages=100)
    for round_ in range(3):
        for number in range(2):
            taken = prefill(memory, ids(33, 1000 * number))
            assert taken.cached_tokens == 0, "the other one took all the room meanwhile"
            memory.release(taken.row, taken.generation, ids(33, 1000 * number))
            memory.check_integrity()
            pages = memory.cache.match(ids(33, 1000 * number), 32, "").pages
            assert windows.resumable(pages) == 8, (round_, number)
    assert memory.allocator.held == 16, "each is cached once"


def test_room_for_idle_windows_is_taken_back_the_least_recently_used_first() -> None:
    windows, memory = make(size=BOUNDS.alone + 4)
    old, new = (prefill(memory, ids(8, start)) for start in (0, 500))
    memory.release(old.row, old.generation, ids(8))
    memory.release(new.row, new.generation, ids(8, 500))
    third = prefill(memory, ids(32, 900))
    found = [windows.resumable(memory.cache.match(ids(8, start), 8, "").pages) for start in (0, 500)]
    assert found[0] < found[1] == 2
    memory.release(third.row, third.generation, ids(0))
    memory.check_integrity()


def test_admission_charges_what_a_row_may_come_to_hold() -> None:
    windows, memory = make(size=BOUNDS.alone + BOUNDS.per_row)
    first, second = admit(memory, ids(100)), admit(memory, ids(100, 500))
    assert memory.admit(ids(8, 900), "", 0) is None, "neither has taken a page yet, but both will"
    for taken in (first, second):
        memory.release(taken.row, taken.generation, ids(0))
    short = [admit(memory, ids(2, n * 10)) for n in range(5)]
    assert len(short) == 5, "short requests are charged for what they are, and one more page"
    assert windows.stats()[0].used == 0


def test_a_shared_window_is_charged_once_from_the_moment_it_is_shared() -> None:
    """Its author may go on while the newcomer stays, and then both hold a window."""
    charge = BOUNDS.per_row + BOUNDS.per_step
    for spare, admitted in ((2 + 2, True), (2 + 1, False)):
        windows, memory = make(size=charge + spare, pages=100)
        author = prefill(memory, ids(40))
        newcomer = memory.admit(ids(41), "", 0)
        # Two pages of the shared window, one page of its own and the next one.
        assert (newcomer is not None) == admitted, spare
        if newcomer is not None:
            for position in range(40, 80):
                assert decode(memory, author.row, position)
            plan(memory, newcomer.row, 40, 1)
            assert windows.stats()[0].used <= windows.size


def test_rows_that_outgrow_the_pool_are_told_so_before_they_are_planned() -> None:
    windows, memory = make(size=BOUNDS.alone)
    rows = [prefill(memory, ids(4, 100 * n)) for n in range(3)]
    for position in range(4, 16):
        grew = [decode(memory, taken.row, position) for taken in rows]
        if not all(grew):
            break
    assert not all(grew) and grew[0], "the pool holds fewer than three windows"
    for taken in rows[1:]:
        memory.release(taken.row, taken.generation, ids(0))
    assert all(decode(memory, rows[0].row, p) for p in range(position + 1, 100)), "alone it always goes on"
    assert windows.stats()[0].used <= windows.size


def test_a_row_gets_no_page_where_another_pool_has_none_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    windows, memory = make(size=20)
    taken = prefill(memory, ids(4))
    monkeypatch.setattr(type(windows), "can_grow", lambda self, rows: False)
    free = memory.obtainable_pages
    assert not decode(memory, taken.row, 4)
    assert memory.obtainable_pages == free


def test_the_entry_check_knows_the_longest_request_and_the_largest_chunk() -> None:
    windows, _ = make(size=BOUNDS.alone)
    assert windows.fits_alone(10**6, 0)
    tight, _ = make(size=BOUNDS.alone - 1)
    assert tight.fits_alone((BOUNDS.alone - 1) * PAGE, 0) and not tight.fits_alone(BOUNDS.alone * PAGE, 0)


def test_misuse_is_a_violation() -> None:
    windows, memory = make(size=20)
    taken = prefill(memory, ids(8))
    with pytest.raises(InvariantViolation, match="window_page_needed"):
        windows.freed(memory._pages[taken.row, :1].copy())
    with pytest.raises(InvariantViolation, match="window_page_present"):
        windows.planned(np.array([taken.row]), np.array([40]), np.array([1]), memory._pages[[taken.row]])
    memory.release(taken.row, taken.generation, ids(0))
    with pytest.raises(InvariantViolation, match="window_page_conservation"):
        windows.released(taken.row)
    with pytest.raises(InvariantViolation, match="window_page_present"):
        windows.admitted(1, AdmissionFacts(9, np.array([3]), 1))


def test_the_device_translates_as_the_host_does_and_padding_to_padding() -> None:
    windows, memory = make(size=12, pages=60)
    kv = KVPool([KVLayerSpec(0, 1, 2, 2, window=WINDOW)], 12, PAGE, torch.float32, CPU, NAME)
    pool, staging, rng = SlidingWindowPool(kv, 60), Staging(CPU), random.Random(3)
    held: list[Seat] = []
    for number in range(60):
        if len(held) == 2:
            gone = held.pop(rng.randrange(2))
            memory.release(gone.row, gone.generation, ids(0))
        taken = memory.admit(ids(rng.randrange(1, 17), 100 * number), "", 0)
        if taken is not None:
            held.append(taken)
            pool.begin(torch.tensor([taken.row]), plan(memory, taken.row, 0, 1), staging)
            assert pool.table.tolist() == [windows.window_of(page) for page in range(61)]
    assert len(set(pool.table[pool.table > 0].tolist())) == int((pool.table > 0).sum()), "two pages in one"
    assert pool.table[0] == 0 and pool.table.dtype == torch.int32


@pytest.mark.parametrize("pages", [1, 2, 3, 5])
def test_the_last_window_of_a_prompt_goes_along_and_a_row_goes_on_behind_it(pages: int) -> None:
    windows, memory = make(20)
    tokens = ids(pages * PAGE + 2)
    row = prefill(memory, tokens).row
    held = memory.pages_of(row, pages * PAGE).copy()
    slots = windows.leaves(held)
    first = max(0, pages * PAGE - WINDOW + 1) // PAGE
    assert slots is not None and windows.slots_for(pages) == len(slots) == (pages - first) * PAGE
    found = [windows.window_of(page) for page in held[first:].tolist()]
    assert 0 not in found and slots.tolist() == [page * PAGE + place for page in found for place in range(PAGE)]
    # Another engine, or this one.
    other, theirs = make(20)
    taken = admit(theirs, tokens)
    into = other.resumes(taken.row, theirs.pages_of(taken.row, pages * PAGE))
    assert len(into) == len(slots)
    theirs.check_integrity()
    writes = plan(theirs, taken.row, pages * PAGE, 2)
    assert writes is not None and set(theirs.pages_of(taken.row, pages * PAGE)[first:]) <= set(writes.pages)
    for length in range(pages * PAGE + 2, pages * PAGE + 30):
        if length % PAGE == 0:
            assert theirs.grow(np.array([taken.row]))
        plan(theirs, taken.row, length, 1)
    theirs.release(taken.row, taken.generation, ids(0))
    theirs.check_integrity()
    assert other.available == 20


def test_a_window_that_another_row_has_taken_does_not_go_along() -> None:
    windows, memory = make(20)
    row = prefill(memory, ids(4 * PAGE + 1)).row
    held = memory.pages_of(row, 4 * PAGE).copy()
    lost = int(held[-1])
    windows._window_of[lost] = 0
    assert windows.leaves(held) is None
