"""Window pages that a duplicate leaves to a page which the same plan has offered, before any step wrote that page."""

from __future__ import annotations

import numpy as np
import pytest

from core.invariants import InvariantViolation
from core.memory.kv_allocator import PagedKVAllocator
from core.memory.request_memory import RequestMemory
from core.memory.rows import RowAllocator
from core.memory.window.window_bounds import WindowBounds
from core.memory.window.window_pages import NAME, WindowPages
from core.prefix.registry import build_prefix_cache

PAGE, CHUNK, WINDOW = 4, 16, 8
TOKENS = np.arange(8, dtype=np.int64)


def made() -> tuple[WindowPages, RequestMemory]:
    bounds = WindowBounds(WINDOW, PAGE, CHUNK)
    windows = WindowPages(12, 30, 5, bounds)
    cache = build_prefix_cache("radix", PAGE)
    return windows, RequestMemory(RowAllocator(4), PagedKVAllocator(30, PAGE), cache, 100, [windows])


def admitted(memory: RequestMemory) -> int:
    seat = memory.admit(TOKENS, "", 0)
    assert seat is not None and seat.cached_tokens == 0, "no other row of these tokens was offered yet"
    return seat.row


def plan(memory: RequestMemory, row: int) -> object:
    rows, start, count = (np.array([each]) for each in (row, 0, len(TOKENS)))
    return memory.plan_companions(rows, start, count).get(NAME)


def one_gives_way_in_the_plan_of_another() -> tuple[WindowPages, RequestMemory, int]:
    """Row `newer` is offered and not planned when the row with the same tokens that ran before it is released."""
    windows, memory = made()
    older, newer = admitted(memory), admitted(memory)
    plan(memory, older)
    memory.offer(newer, TOKENS)
    memory.release(older, int(memory.rows.generations[older]), TOKENS)
    return windows, memory, newer


def test_a_row_begins_pages_that_have_the_window_pages_of_a_duplicate() -> None:
    windows, memory, row = one_gives_way_in_the_plan_of_another()
    pages = memory.pages_of(row, len(TOKENS)).tolist()
    given = [windows.window_of(page) for page in pages]
    assert all(given), "the duplicate's"
    memory.check_integrity()
    plan(memory, row)
    assert [windows.window_of(page) for page in pages] == given
    memory.check_integrity()
    memory.release(row, int(memory.rows.generations[row]), TOKENS)
    memory.check_integrity()
    assert windows.available == windows.size


def test_a_page_given_in_an_earlier_plan_is_not_begun_again() -> None:
    """As before: a page whose window page was never taken back belongs to a row that does not know of this one."""
    _, memory, row = one_gives_way_in_the_plan_of_another()
    other = memory.admit(TOKENS + 50, "", 0)
    assert other is not None
    plan(memory, other.row)
    with pytest.raises(InvariantViolation, match="window_page_conservation"):
        plan(memory, row)


def test_a_given_page_that_lost_its_window_page_gets_another() -> None:
    windows, memory, row = one_gives_way_in_the_plan_of_another()
    first = memory.pages_of(row, PAGE)
    windows.freed(first)
    before = windows.window_of(int(first[0]))
    plan(memory, row)
    assert before == 0 and windows.window_of(int(first[0])) > 0
    memory.check_integrity()
