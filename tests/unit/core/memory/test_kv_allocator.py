"""Page ownership: padding, atomic allocation, double frees, conservation."""

from __future__ import annotations

import random

import numpy as np
import pytest

from core.invariants import InvariantViolation
from core.memory.kv_allocator import PagedKVAllocator


def test_alloc_is_atomic_and_never_gives_page_zero() -> None:
    allocator = PagedKVAllocator(5, 16)
    assert allocator.alloc(6) is None and allocator.available == 5
    pages = allocator.alloc(5)
    assert pages is not None and sorted(pages.tolist()) == [1, 2, 3, 4, 5]
    assert allocator.alloc(1) is None
    empty = allocator.alloc(0)
    assert empty is not None and len(empty) == 0


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (16, 1), (17, 2), (160, 10)])
def test_pages_for_rounds_up(tokens: int, pages: int) -> None:
    assert PagedKVAllocator(1, 16).pages_for(tokens) == pages


@pytest.mark.parametrize(
    ("pages", "name"),
    [
        ([1], "page_double_free"),
        ([0], "page_padding_reserved"),
        ([6], "page_padding_reserved"),
        ([5, 5], "page_double_free"),
    ],
)
def test_wrong_frees_are_named_and_change_nothing(pages: list[int], name: str) -> None:
    allocator = PagedKVAllocator(5, 1)
    taken = allocator.alloc(1)
    assert taken is not None and taken.tolist() == [1]
    allocator.free(taken)
    allocator.alloc(5)
    allocator.free(np.array([1]))
    with pytest.raises(InvariantViolation, match=name):
        allocator.free(np.array(pages))
    assert allocator.available == 1
    allocator.check_integrity()


def test_random_use_conserves_pages(seed: int) -> None:
    rng = random.Random(seed)
    allocator, held = PagedKVAllocator(40, 4), list[int]()
    for _ in range(2000):
        count = rng.randint(0, 12)
        if rng.random() < 0.5:
            pages = allocator.alloc(count)
            assert (pages is None) == (count > 40 - len(held))
            held += [] if pages is None else pages.tolist()
        else:
            rng.shuffle(held)
            allocator.free(np.array(held[:count], np.int64))
            del held[:count]
        assert allocator.held == len(held) == len(set(held))
        allocator.check_integrity()


def test_integrity_check_sees_a_leaked_page() -> None:
    allocator = PagedKVAllocator(4, 1)
    allocator._top -= 1
    with pytest.raises(InvariantViolation, match="page_conservation"):
        allocator.check_integrity()
