"""Rows, pages and cached prefixes are taken and given back together."""

from __future__ import annotations

import numpy as np
import pytest

from core.memory.kv_allocator import PagedKVAllocator
from core.memory.request_memory import RequestMemory
from core.memory.rows import RowAllocator
from core.memory.seat import Seat
from core.prefix.registry import build_prefix_cache
from tests.support.page_slots import slots_of

PAGE = 4


def make(rows: int = 4, pages: int = 12, cache: str = "radix") -> RequestMemory:
    return RequestMemory(RowAllocator(rows), PagedKVAllocator(pages, PAGE), build_prefix_cache(cache, PAGE), 64)


def admit(memory: RequestMemory, ids: np.ndarray, salt: str = "", reserve: int = 0) -> Seat:
    admission = memory.admit(ids, salt, reserve)
    assert admission is not None
    memory.check_integrity()
    return admission


def ids(count: int, start: int = 0) -> np.ndarray:
    return np.arange(start, start + count, dtype=np.int64)


def test_admission_is_both_or_neither() -> None:
    memory = make(rows=2, pages=4)
    assert memory.admit(ids(17), "", 0) is None, "five pages do not fit"
    assert memory.rows.used == 0 and memory.allocator.held == 0
    admit(memory, ids(9))
    assert memory.admit(ids(8, 50), "", 0) is None, "one page is left"
    assert memory.admit(ids(4, 50), "", 1) is None, "the last page is reserved"
    admit(memory, ids(4, 50))
    assert memory.rows.available == 0 and memory.allocator.available == 0


def test_table_writes_name_every_slot_once() -> None:
    memory = make()
    a = admit(memory, ids(6))
    assert memory.grow(np.array([a.row]))
    writes = memory.take_writes()
    rows, positions, slots = writes.tokens()
    assert rows.tolist() == [a.row] * 12 and positions.tolist() == list(range(12))
    assert (slots_of(memory, rows, positions) == slots).all()
    assert len(set(slots.tolist())) == 12 and slots.min() >= PAGE, "page 0 is padding"
    assert writes.pages.tolist() == (slots[::PAGE] // PAGE).tolist(), "three entries, and not twelve, go to the device"
    assert len(memory.take_writes().rows) == 0


def test_one_token_is_always_left_to_compute() -> None:
    memory = make()
    a = admit(memory, ids(8))
    memory.release(a.row, a.generation, ids(8))
    assert admit(memory, ids(8)).cached_tokens == 4


def test_a_prefix_ends_where_it_may() -> None:
    """Here within no run of tokens 3 to 7, as those of an image, of which page 4 to 8 has a part."""
    memory = make()
    a = admit(memory, ids(18))
    memory.release(a.row, a.generation, ids(18))
    for tokens, found in ((18, 16), (8, 0), (7, 0), (10, 8)):
        seat = memory.admit(ids(tokens), "", 0, usable=lambda count: 3 if 3 < count < 7 else count)
        assert seat is not None and seat.cached_tokens == found, tokens
        memory.release(seat.row, seat.generation, ids(tokens))


def test_offered_pages_are_shared_while_their_owner_runs() -> None:
    memory = make()
    a = admit(memory, ids(10))
    memory.offer(a.row, ids(10))
    b = admit(memory, np.append(ids(8), [99, 98]))
    assert b.cached_tokens == 8
    shared = slots_of(memory, np.full(8, a.row), ids(8))
    assert (slots_of(memory, np.full(8, b.row), ids(8)) == shared).all()
    memory.release(a.row, a.generation, ids(10))
    memory.check_integrity()
    memory.release(b.row, b.generation, np.append(ids(8), [99, 98]))
    memory.check_integrity()
    assert [p.used for p in memory.stats()] == [0, 0]


def test_a_prefix_computed_twice_is_kept_once_and_never_locked_twice() -> None:
    memory = make(pages=4)
    a, b = admit(memory, ids(8)), admit(memory, ids(8))
    memory.offer(a.row, ids(8))
    memory.offer(b.row, ids(8))
    memory.check_integrity()
    memory.release(a.row, a.generation, ids(8))
    assert memory.cache.locked_pages == 0, "b has its own copies, so the cached ones can be evicted"
    memory.release(b.row, b.generation, ids(8))
    memory.check_integrity()
    assert memory.cache.cached_pages == 2 and memory.allocator.available == 2


def test_cached_pages_are_evicted_for_newcomers() -> None:
    memory = make(pages=4)
    a = admit(memory, ids(16))
    memory.release(a.row, a.generation, ids(16))
    assert memory.allocator.available == 0 and memory.obtainable_pages == 4
    b = admit(memory, ids(16, 100))
    assert b.cached_tokens == 0 and memory.obtainable_pages == 0
    assert not memory.grow(np.array([b.row]))


@pytest.mark.parametrize("cache", ["radix", "none"])
def test_samples_of_one_request_share_their_prompt(cache: str) -> None:
    memory = make(cache=cache)
    salt = memory.cache.namespace("", "group-1")
    first = admit(memory, ids(9), salt)
    memory.offer(first.row, ids(9))
    second = admit(memory, ids(9), salt)
    assert second.cached_tokens == 8
    memory.release(first.row, first.generation, ids(9))
    memory.release(second.row, second.generation, ids(9))
    memory.check_integrity()
    assert memory.cache.cached_pages == (2 if cache == "radix" else 0)


def test_stats_add_up() -> None:
    memory = make()
    a = admit(memory, ids(10))
    memory.offer(a.row, ids(10))
    rows, pages = memory.stats()
    assert (rows.used, rows.free) == (1, 3) and (pages.used, pages.cached, pages.free) == (3, 0, 9)
    memory.release(a.row, a.generation, ids(10))
    rows, pages = memory.stats()
    assert (rows.used, pages.used, pages.cached, pages.free) == (0, 0, 2, 10)


def test_a_row_that_changes_hands_within_a_plan_has_one_owner_s_writes() -> None:
    """The device applies the entries of one step in no order, so no place may be named twice."""
    memory = make(cache="none")
    a, b = admit(memory, ids(6)), admit(memory, ids(4, 50))
    memory.take_writes()
    assert memory.grow(np.array([b.row, a.row]))
    memory.release(a.row, a.generation, ids(6))
    taken = admit(memory, ids(11, 20))
    assert taken.row == a.row
    rows, positions, slots = memory.take_writes().tokens()
    places = list(zip(rows.tolist(), positions.tolist(), strict=True))
    assert len(set(places)) == len(places) == 4 + 12
    assert (slots_of(memory, rows, positions) == slots).all()


@pytest.mark.parametrize("cache", ["radix", "none"])
def test_what_would_be_admitted_is_admitted(cache: str) -> None:
    """Six pages; those that two rows read do not come free with one of them."""
    memory = make(rows=3, pages=6, cache=cache)
    first = admit(memory, ids(9))
    memory.offer(first.row, ids(8))
    second = admit(memory, np.append(ids(8), [40, 41]))
    rows = np.array([second.row])
    assert memory.would_admit(ids(12, 60), "", 0, rows) == 0
    assert memory.would_admit(ids(13, 60), "", 0, rows) is None
    assert memory.would_admit(ids(12, 60), "", 1, rows) is None
    assert memory.would_admit(ids(24, 60), "", 0, np.array([first.row, second.row])) == 0
    memory.check_integrity()
    memory.release(second.row, second.generation, np.append(ids(8), [40, 41]))
    assert memory.admit(ids(12, 60), "", 0, at_most=0) is not None
    memory.check_integrity()


def test_asking_what_would_be_admitted_holds_nothing() -> None:
    """The newcomer's prefix is cached and has no owner: after the question it can be evicted as it could before."""
    memory = make(rows=1, pages=6)
    kept = admit(memory, ids(9))
    memory.release(kept.row, kept.generation, ids(9))
    running = admit(memory, ids(13, 50))
    before = memory.obtainable_pages
    for reserve in (0, 100):
        answer = memory.would_admit(ids(12), "", reserve, np.array([running.row]))
        assert (answer is None) == (reserve > 0)
        assert memory.obtainable_pages == before == 2
    memory.release(running.row, running.generation, ids(0))
    assert memory.flush() == 2 and memory.allocator.held == 0


def test_the_token_left_to_compute_is_asked_room_for() -> None:
    """Both pages of the prompt are cached. The second is computed again, for the sake of its last token."""
    memory = make(rows=2, pages=4)
    kept = admit(memory, ids(8))
    memory.release(kept.row, kept.generation, ids(8))
    running = admit(memory, ids(8, 50))
    rows = np.array([running.row])
    assert memory.would_admit(ids(8), "", 0, rows) == 4
    assert memory.would_admit(ids(8), "", 3, rows) is None


def test_a_page_that_is_not_full_is_not_vouched_for() -> None:
    """Finite logits came of five tokens: of the second page, where the sixth may be the bad one, they say nothing."""
    memory = make()
    owner = admit(memory, ids(12))
    memory.offer(owner.row, ids(12))
    memory.vouch(owner.row, 5)
    victim = admit(memory, ids(13))
    assert memory.pages_found(np.array([victim.row])).tolist() == [3]
    doubt = memory.doubt(victim.row, ids(13), 12)
    assert doubt.readers == (owner.row,)
    for each in (victim, owner):
        memory.release(each.row, each.generation, ids(0))
    memory.condemn(doubt)
    assert memory.cache.peek(ids(12), 12, "") == 4
    memory.check_integrity()


def test_logits_vouch_for_what_they_depend_on() -> None:
    """Windows of six tokens in all: of 18 the page that begins at 12 is vouched for, and none before it."""
    memory = RequestMemory(RowAllocator(2), PagedKVAllocator(12, PAGE), build_prefix_cache("radix", PAGE), 64, reach=6)
    owner = admit(memory, ids(18))
    memory.vouch(owner.row, 18)
    memory.release(owner.row, owner.generation, ids(18))
    reader = admit(memory, np.append(ids(16), [99]))
    assert reader.cached_tokens == 16
    doubt = memory.doubt(reader.row, np.append(ids(16), [99]), reader.cached_tokens)
    memory.release(reader.row, reader.generation, ids(0))
    memory.condemn(doubt)
    assert memory.cache.cached_pages == 0, "from the first page that nothing vouches for"
