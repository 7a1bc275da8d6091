"""Window pages under drafts: there for all that a row may have, and kept for the least, in the smallest of pools."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from core.memory.kv_allocator import PagedKVAllocator
from core.memory.request_memory import RequestMemory
from core.memory.rows import RowAllocator
from core.memory.window.window_bounds import WindowBounds
from core.memory.window.window_pages import WindowPages
from core.prefix.registry import build_prefix_cache

LIMIT = 90
STEPS = 12


class Row:
    """A row that decodes behind `length` tokens, in a pool of the least size, and up to `depth` steps in flight."""

    def __init__(self, bounds: WindowBounds, drafts: int, depth: int, length: int = 1) -> None:
        pages = -(-LIMIT // bounds.page_size)
        self.windows = WindowPages(min(bounds.alone, pages), pages, 3, bounds)
        allocator = PagedKVAllocator(pages, bounds.page_size)
        cache = build_prefix_cache("none", bounds.page_size)
        self.memory = RequestMemory(RowAllocator(2), allocator, cache, LIMIT, [self.windows])
        taken = self.memory.admit(np.arange(length), "", 0)
        assert taken is not None and self.memory.fits_alone(LIMIT)
        self.row, self.drafts, self.depth = taken.row, drafts, depth
        for start in range(0, length, bounds.chunk):
            self._plan(start, min(bounds.chunk, length - start), 0)
        self.least = self.most = length
        self.flying: list[int] = []

    def step(self, right: int) -> None:
        """Plan a step of which `right` drafts will be right, once no more than `depth` - 1 others are in flight."""
        while len(self.flying) >= self.depth:
            known = self.flying.pop(0)
            self.least += known
            self.most -= self.drafts - known
        rows = np.array([self.row])
        while self.memory.needs_page(rows, np.array([self.most + self.drafts]))[0]:
            assert self.memory.grow(rows), "alone it always grows"
        self.least, self.most = self.least + 1, self.most + self.drafts + 1
        self._plan(self.least - 1, 1, self.most - self.least)
        self.flying.append(right)

    def _plan(self, start: int, count: int, ahead: int) -> None:
        try:
            self.memory.plan_companions(*(np.array([each]) for each in (self.row, start, count, ahead)))
        except RuntimeError as error:
            raise AssertionError("a step that was planned lacks a window page") from error
        self.memory.check_integrity()

    def held(self) -> list[int]:
        """Places, among the row's pages, of those that have a window page in use."""
        pages = self.memory._pages[self.row].tolist()
        return [place for place, page in enumerate(pages) if page and self.windows._users[page]]


@pytest.mark.parametrize(("page", "window", "chunk"), [*itertools.product((1, 2, 4), (1, 2, 7, 8), (1, 3, 8))])
@pytest.mark.parametrize("depth", [1, 2])
def test_the_least_pool_has_room_for_every_draft(page: int, window: int, chunk: int, depth: int) -> None:
    """Whatever is right of 3 drafts a step: all, none, or by turns. What left the window is given back meanwhile: in
    SGLang #34823 windows of rows with drafts grew with their length.
    """
    bounds = WindowBounds(window, page, chunk, 3 * depth)
    for turns in ([3], [0], [3, 0], [0, 3], [3, 3, 0, 1]):
        row = Row(bounds, 3, depth)
        for right in itertools.islice(itertools.cycle(turns), STEPS):
            row.step(right)


@pytest.mark.parametrize("page", [1, 2, 4])
@pytest.mark.parametrize("window", [1, 5, 8])
@pytest.mark.parametrize("doubt", [0, 1, 3, 10])
def test_the_bound_counts_what_is_in_doubt(page: int, window: int, doubt: int) -> None:
    """Against all places, by counting: from the window of the least that a row may have to the most."""
    bounds = WindowBounds(window, page, 1, doubt)
    held = [
        -(-(least + 1 + more) // page) - int(bounds.first_places(np.array([least]))[0])
        for least in range(40)
        for more in range(doubt + 1)
    ]
    assert max(held) <= bounds.per_row <= max(held) + 1


def test_pages_begin_by_the_most_and_are_passed_by_the_least() -> None:
    """Pages of one token, a window of 4, up to 3 drafts a step, and a step in flight when the next one is planned."""
    row = Row(WindowBounds(4, 1, 8, 6), 3, 2, length=8)
    row.step(right=3)
    # It has 9 to 12 tokens, and the next of 9 sees the last three of them.
    assert row.held() == [6, 7, 8, 9, 10, 11]
    row.step(right=0)
    assert row.held() == [7, 8, 9, 10, 11, 12, 13, 14, 15], "10 to 16"
    row.step(right=0)
    # All drafts of the first were right: 13 to 16 before this step, 14 to 20 behind it.
    assert row.held() == list(range(11, 20))
    row.step(right=0)
    assert row.held() == list(range(12, 21)), "15 to 21, since those of the second were wrong"


def test_wrong_drafts_pass_no_page() -> None:
    """A row that gets one token a step needs what a row without drafts would."""
    row, plain = Row(WindowBounds(4, 1, 8, 3), 3, 1, length=8), Row(WindowBounds(4, 1, 8), 0, 1, length=8)
    for _ in range(STEPS):
        row.step(right=0)
        plain.step(right=0)
        assert set(plain.held()) <= set(row.held())
