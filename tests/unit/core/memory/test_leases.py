"""Pages of a transfer in flight come back when it is over: once, and not before."""

from __future__ import annotations

import numpy as np
import pytest

from core.invariants import InvariantViolation
from core.memory.companion import Companion
from core.memory.kv_allocator import PagedKVAllocator
from core.memory.recurrent.state_slots import StateSlots
from core.memory.recurrent.state_snapshots import Tracking
from core.memory.request_memory import RequestMemory
from core.memory.rows import RowAllocator
from core.memory.seat import Seat
from core.prefix.base import group_salt
from core.prefix.registry import build_prefix_cache

PAGE = 4
NO_ROWS = np.empty(0, np.int64)


def make(cache: str = "none", pages: int = 8, *companions: Companion) -> RequestMemory:
    prefixes = build_prefix_cache(cache, PAGE)
    return RequestMemory(RowAllocator(4), PagedKVAllocator(pages, PAGE), prefixes, 64, companions)


def ids(count: int, start: int = 0) -> np.ndarray:
    return np.arange(start, start + count, dtype=np.int64)


def admit(memory: RequestMemory, tokens: np.ndarray) -> Seat:
    seat = memory.admit(tokens, "", 0)
    assert seat is not None
    return seat


def test_freed_pages_wait_for_the_end_of_the_lease() -> None:
    memory = make()
    seat = admit(memory, ids(12))
    lease = memory.lend(seat.row, 6)
    assert memory.allocator.available == 5 and memory.leases.coming == 0, "the row still owns them"
    memory.release(seat.row, seat.generation, ids(0))
    memory.check_integrity()
    assert memory.allocator.available == 6 and memory.leases.coming == 2, "two pages hold six tokens"
    memory.reclaim(lease)
    memory.check_integrity()
    assert memory.allocator.available == 8 and memory.leases.coming == 0
    with pytest.raises(InvariantViolation, match="lease_conservation"):
        memory.reclaim(lease)


def test_a_lease_that_ends_first_changes_nothing() -> None:
    memory = make()
    seat = admit(memory, ids(12))
    memory.reclaim(memory.lend(seat.row, 12))
    assert memory.allocator.available == 5
    memory.release(seat.row, seat.generation, ids(0))
    assert memory.allocator.available == 8


def test_the_last_of_two_leases_frees_the_page() -> None:
    memory = make()
    seat = admit(memory, ids(4))
    first, second = memory.lend(seat.row, 4), memory.lend(seat.row, 4)
    memory.release(seat.row, seat.generation, ids(0))
    memory.reclaim(second)
    assert memory.allocator.available == 7
    memory.reclaim(first)
    assert memory.allocator.available == 8


def test_leased_pages_of_the_cache_are_not_evicted() -> None:
    memory = make("radix")
    seat = admit(memory, ids(8))
    memory.offer(seat.row, ids(8))
    lease = memory.lend(seat.row, 8)
    memory.release(seat.row, seat.generation, ids(8))
    assert memory.obtainable_pages == 6 and memory.leases.coming == 2
    assert memory.admit(ids(28, 50), "", 0) is None, "seven pages are there once the lease has ended"
    assert memory.would_admit(ids(28, 50), "", 0, NO_ROWS) == 0
    memory.reclaim(lease)
    memory.check_integrity()
    assert memory.obtainable_pages == 8 and memory.leases.coming == 0
    admit(memory, ids(28, 50))


def test_what_is_condemned_under_a_lease_is_freed_at_its_end() -> None:
    memory = make("radix")
    seat = admit(memory, ids(8))
    memory.offer(seat.row, ids(8))
    doubt = memory.doubt(seat.row, ids(8), 0)
    lease = memory.lend(seat.row, 8)
    memory.release(seat.row, seat.generation, ids(0))
    memory.condemn(doubt)
    memory.check_integrity()
    assert memory.cache.cached_pages == 0 and memory.allocator.available == 6
    memory.reclaim(lease)
    memory.check_integrity()
    assert memory.allocator.available == 8


def test_only_what_is_overdue_expires() -> None:
    memory = make()
    seat = admit(memory, ids(12))
    late = memory.lend(seat.row, 12, deadline=5.0)
    never = memory.lend(seat.row, 12)
    assert memory.leases.next_deadline() == 5.0
    assert memory.leases.overdue(4.9) == [] and memory.leases.overdue(5.0) == [late]
    memory.reclaim(late)
    assert never in memory.leases and memory.leases.next_deadline() is None


def test_pages_that_are_leased_first_and_cached_later_are_not_evicted_either() -> None:
    memory = make("radix")
    seat = admit(memory, ids(8))
    lease = memory.lend(seat.row, 8)
    memory.release(seat.row, seat.generation, ids(8))
    memory.check_integrity()
    assert memory.cache.cached_pages == 2 and memory.obtainable_pages == 6 and memory.leases.coming == 2
    memory.reclaim(lease)
    assert memory.obtainable_pages == 8 and memory.cache.locked_pages == 0


def test_what_is_kept_for_a_leased_page_goes_with_its_owner() -> None:
    states = StateSlots(size=2, num_rows=5, tracking=Tracking(PAGE, interval=PAGE, buffers=2))
    memory = make("none", 8, states)
    seat = admit(memory, ids(6))
    row = np.array([seat.row])
    memory.plan_companions(row, np.array([0]), np.array([6]))
    assert states.resumable(memory.pages_of(seat.row, 6)) == 1 and states.stats()[0].cached == 1
    lease = memory.lend(seat.row, 6)
    memory.release(seat.row, seat.generation, ids(0))
    assert states.stats()[0].cached == 0, "no request can find the page, so its state would only take up a slot"
    later = admit(memory, ids(6))
    memory.plan_companions(np.array([later.row]), np.array([0]), np.array([6]))
    memory.reclaim(lease)
    memory.check_integrity()
    assert states.stats()[0].cached == 1 and memory.allocator.available == 6


def test_what_only_a_lease_kept_in_a_cache_that_keeps_nothing_is_free_at_its_end() -> None:
    memory, salt = make("none"), group_salt("g")
    seat = memory.admit(ids(8), salt, 0)
    assert seat is not None
    memory.offer(seat.row, ids(8))
    lease = memory.lend(seat.row, 8)
    memory.release(seat.row, seat.generation, ids(8))
    assert memory.cache.cached_pages == 2 and memory.allocator.available == 6
    memory.reclaim(lease)
    memory.check_integrity()
    assert memory.cache.cached_pages == 0 and memory.allocator.available == 8


def test_a_flush_of_a_tenant_leaves_the_leases_of_others_locked() -> None:
    """Their pages would count as room, and make none."""
    memory = RequestMemory(RowAllocator(3), PagedKVAllocator(12, PAGE), build_prefix_cache("radix", PAGE), 64)
    for salt in ("a\0", "b\0"):
        seat = memory.admit(ids(8), salt, 0)
        assert seat is not None
        memory.lend(seat.row, 8)
        memory.release(seat.row, seat.generation, ids(8))
    assert memory.flush("a") == 2 and memory.cache.locked_pages == 2
    memory.check_integrity()
