"""What is condemned is found by no match, whatever was below it; the books of the cache stay right."""

from __future__ import annotations

import random

import numpy as np
import pytest

from core.invariants import InvariantViolation
from core.prefix.base import group_salt
from core.prefix.none import NoPrefixCache
from core.prefix.radix import RadixCache
from core.types.arrays import Ints
from core.types.prefixes import PrefixStored

SIZE = 2


def ids(*tokens: int) -> Ints:
    return np.array(tokens, np.int64)


def pages(*numbers: int) -> Ints:
    return np.array(numbers, np.int64)


class Told:
    """An observer that keeps what is left."""

    def __init__(self) -> None:
        self.held: set[int] = set()

    def stored(self, salt: str, change: PrefixStored) -> None:
        self.held |= set(change.pages.tolist())

    def removed(self, pages: Ints) -> None:
        assert self.held >= set(pages.tolist()), "told twice"
        self.held -= set(pages.tolist())


def build() -> tuple[RadixCache, Told]:
    """Three prompts: two go on from the same two pages, the third parts after the first."""
    cache, told = RadixCache(SIZE), Told()
    cache.observe(told)
    cache.insert(ids(1, 1, 2, 2, 3, 3), pages(10, 11, 12), "", 0)
    cache.insert(ids(1, 1, 2, 2, 4, 4), pages(10, 11, 13), "", 0)
    cache.insert(ids(1, 1, 5, 5), pages(10, 14), "", 0)
    return cache, told


@pytest.mark.parametrize(
    ("kept", "gone", "left"),
    [(0, {10, 11, 12, 13, 14}, 0), (2, {11, 12, 13}, 1), (4, {12}, 2), (6, set(), 3)],
)
def test_everything_behind_a_length_goes(kept: int, gone: set[int], left: int) -> None:
    cache, told = build()
    prompt = ids(1, 1, 2, 2, 3, 3, 9)
    node = cache.behind(prompt, kept, "")
    cache.check_integrity()
    assert (node is None) == (not gone)
    dropped = cache.condemn(node) if node is not None else pages()
    assert set(dropped.tolist()) == gone and len(dropped) == len(gone)
    assert cache.peek(prompt, 6, "") == left * SIZE
    cache.check_integrity()
    assert told.held == {10, 11, 12, 13, 14} - gone and cache.cached_pages == len(told.held)
    assert set(cache.clear().tolist()) == {10, 11, 12, 13, 14} - gone, "a flush gives back the rest, and no page twice"
    assert cache.cached_pages == cache.locked_pages == 0 and not told.held


def test_the_cut_may_lie_inside_an_edge() -> None:
    cache, told = RadixCache(SIZE), Told()
    cache.observe(told)
    cache.insert(ids(*range(12)), pages(1, 2, 3, 4, 5, 6), "", 0)
    reader = cache.match(ids(*range(12)), 4, "").node
    cache.lock(reader)
    node = cache.behind(ids(*range(8), 99, 99), 6, "")
    assert node is not None
    assert cache.condemn(node).tolist() == [4, 5, 6], "what a longer prompt put behind it goes as well"
    cache.check_integrity()
    assert cache.locked_pages == 2 and told.held == {1, 2, 3}
    cache.unlock(reader)
    assert sorted(cache.clear().tolist()) == [1, 2, 3]


def test_no_page_goes_that_somebody_reads() -> None:
    cache, _ = build()
    reader = cache.match(ids(1, 1, 2, 2, 4, 4), 6, "").node
    cache.lock(reader)
    node = cache.behind(ids(1, 1, 2, 2, 3, 3), 2, "")
    assert node is not None and node.leads_to(reader)
    with pytest.raises(InvariantViolation, match="prefix_lock_balance"):
        cache.condemn(node)
    cache.unlock(reader)
    assert len(cache.condemn(node)) == 3
    cache.check_integrity()


def test_readers_are_told_from_neighbours() -> None:
    cache, _ = build()
    node = cache.behind(ids(1, 1, 2, 2, 3, 3), 2, "")
    assert node is not None
    reads = {
        last: node.leads_to(cache.match(ids(*last), 6, "").node) for last in ((1, 1, 2, 2, 4, 4), (1, 1, 5, 5), (1, 1))
    }
    assert list(reads.values()) == [True, False, False]


def test_other_namespaces_are_not_touched() -> None:
    cache, _ = build()
    cache.insert(ids(1, 1, 2, 2), pages(20, 21), "tenant", 0)
    node = cache.behind(ids(1, 1, 2, 2), 0, "")
    assert node is not None
    cache.condemn(node)
    assert cache.peek(ids(1, 1, 2, 2), 4, "tenant") == 4 and cache.namespaces == 1
    assert cache.behind(ids(1, 1), 0, "nobody") is None
    cache.check_integrity()


def test_samples_of_one_request_without_a_cache() -> None:
    cache, salt = NoPrefixCache(SIZE), group_salt("g")
    assert cache.behind(ids(1, 1), 0, "") is None
    found = cache.insert(ids(1, 1, 2, 2), pages(1, 2), salt, 0).node
    assert found is not None
    cache.lock(found)
    node = cache.behind(ids(1, 1, 2, 2), 0, salt)
    assert node is not None
    assert cache.unlock(found).tolist() == [1, 2], "its last reader left"
    assert cache.condemn(node).size == 0, "and so it went already"
    cache.check_integrity()


def test_random_trees(seed: int) -> None:
    """Against a set of page-wise prefixes: exactly those that begin with the condemned one go."""
    rng = random.Random(seed)
    for _ in range(60):
        cache, free = RadixCache(SIZE), iter(range(1, 10_000))
        held: dict[tuple[int, ...], int] = {}
        for _ in range(rng.randrange(1, 12)):
            prompt = [rng.randrange(2) for _ in range(SIZE * rng.randrange(1, 7))]
            cuts = [tuple(prompt[: SIZE * n]) for n in range(1, len(prompt) // SIZE + 1)]
            numbers = [held.setdefault(cut, next(free)) for cut in cuts]
            cache.insert(ids(*prompt), pages(*numbers), "", 0)
        prompt = rng.choice(list(held))
        kept = SIZE * rng.randrange(len(prompt) // SIZE)
        first = prompt[: kept + SIZE]
        node = cache.behind(ids(*prompt), kept, "")
        assert node is not None
        gone = cache.condemn(node).tolist()
        assert sorted(gone) == sorted(page for cut, page in held.items() if cut[: len(first)] == first)
        cache.check_integrity()
        for cut in held:
            assert (cache.peek(ids(*cut), len(cut), "") == len(cut)) == (cut[: len(first)] != first)
