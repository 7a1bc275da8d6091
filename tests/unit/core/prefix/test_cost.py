"""Costs grow with the prompt and nothing else: four times the pages take at most eight times as long.

A quadratic step would show as a factor of 16, what does not fit the caches of the processor as one of 5. The two sizes
are measured in turns and compared by their fastest runs, because a neighbour on the same core slows single runs down by
half.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from core.prefix.radix import RadixCache
from tests.support.growth import Work, growth

PAGE = 16


def prompt(pages: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50_000, pages * PAGE)


def inserting(pages: int) -> Work:
    """A whole prompt at once into an empty tree."""
    cache, ids, numbers = RadixCache(PAGE), prompt(pages), np.arange(1, pages + 1)
    cache.insert(ids, numbers, "warm", 0)
    cache.clear()
    return lambda: cache.insert(ids, numbers, "", 0)


def matching_deep(pages: int) -> Work:
    """A prompt whose every page is a node of its own, locked and unlocked: the longest path there can be."""
    cache, ids = RadixCache(1), prompt(pages)[:pages]
    cache.insert(ids, np.arange(1, pages + 1), "", 0)
    for cut in range(pages - 1, 0, -1):
        cache.match(ids, cut, "")

    def work() -> None:
        node = cache.match(ids, ids.size, "").node
        cache.lock(node)
        cache.unlock(node)

    return work


def evicting(pages: int) -> Work:
    """Many short leaves below one head, evicted one page at a time."""
    cache, head = RadixCache(PAGE), prompt(1)
    for leaf in range(pages):
        ids = np.append(head, np.full(PAGE, leaf))
        cache.insert(ids, np.array([1, leaf + 2]), "", 0)

    def work() -> None:
        for _ in range(pages):
            cache.evict(1)

    return work


def matching_shallow(prompts: int) -> Work:
    """A short prompt in a large tree."""
    cache = RadixCache(PAGE)
    for each in range(prompts):
        cache.insert(prompt(2, each), np.array([2 * each + 1, 2 * each + 2]), "", 0)
    ids = prompt(2, prompts // 2)

    def work() -> None:
        for _ in range(1000):
            cache.match(ids, ids.size, "")

    return work


@pytest.mark.parametrize("make", [inserting, matching_deep, evicting], ids=lambda make: make.__name__)
def test_cost_is_linear_in_pages(make: Callable[[int], Work]) -> None:
    assert growth(make, 1500, 6000, most=8) < 8


def test_cost_of_a_match_does_not_grow_with_the_tree() -> None:
    """Caches of the processor may show; a scan of the tree would be a factor of 8."""
    assert growth(matching_shallow, 500, 4000, most=2.5) < 2.5
