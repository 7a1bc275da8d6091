"""Costs grow with the prompt and nothing else: twice the pages take at most 2.5 times as long.

Each figure is the best of several runs, which is what the code costs when nothing else runs; a quadratic step would
show as a factor of 4.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import numpy as np
import pytest

from core.prefix.radix import RadixCache

Work = Callable[[], object]
PAGE = 16


def prompt(pages: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50_000, pages * PAGE)


def best_of(make: Callable[[int], Work], pages: int, runs: int = 5) -> float:
    """Seconds of the fastest run; `make` prepares each one without being timed."""
    times = []
    for _ in range(runs):
        work = make(pages)
        gc.collect()
        gc.disable()
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
        gc.enable()
    return min(times)


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


@pytest.mark.parametrize("work", [inserting, matching_deep, evicting], ids=lambda work: work.__name__)
def test_cost_is_linear_in_pages(work: Callable[[int], Work]) -> None:
    single, double = best_of(work, 3000), best_of(work, 6000)
    print(f"{work.__name__}: {single * 1e3:.2f} ms at 3000 pages, {double * 1e3:.2f} ms at 6000")
    assert double / single < 2.5


def test_cost_of_a_match_does_not_grow_with_the_tree() -> None:
    """Caches of the processor may show; a scan of the tree would be a factor of 8."""
    small, large = best_of(matching_shallow, 500), best_of(matching_shallow, 4000)
    print(f"{small * 1e3:.2f} µs per match among 500 prompts, {large * 1e3:.2f} µs among 4000")
    assert large / small < 2.5
