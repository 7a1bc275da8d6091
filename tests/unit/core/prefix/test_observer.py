"""What the radix tree tells an observer: enough to know at every moment which prefix each page ends."""

from __future__ import annotations

import random

import numpy as np
import pytest

from core.prefix.none import NoPrefixCache
from core.prefix.radix import RadixCache
from core.types.arrays import Ints
from core.types.prefixes import PrefixStored

PAGE = 2
TENANTS = ("", "other")


class Listener:
    """A `PrefixObserver` that keeps, by page number, the namespace and all ids up to the end of the page."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[str, tuple[int, ...]]] = {}

    def stored(self, salt: str, change: PrefixStored) -> None:
        """Every page is new, and its parent is known under the same salt."""
        before: tuple[int, ...] = ()
        if change.parent:
            assert self.known[change.parent][0] == salt
            before = self.known[change.parent][1]
        for ids, page in zip(change.ids.reshape(-1, PAGE).tolist(), change.pages.tolist(), strict=True):
            assert page not in self.known
            before = (*before, *ids)
            self.known[page] = (salt, before)

    def removed(self, pages: Ints) -> None:
        """Every page was known."""
        for page in pages.tolist():
            del self.known[page]


def told_afresh(cache: RadixCache) -> dict[int, tuple[str, tuple[int, ...]]]:
    listener = Listener()
    for salt in TENANTS:
        for change in cache.contents(salt):
            listener.stored(salt, change)
    return listener.known


@pytest.mark.parametrize("round_", range(8))
def test_the_changes_add_up_to_the_contents_at_every_moment(seed: int, round_: int) -> None:
    dice = random.Random(f"{seed} {round_}")
    cache, listener, free = RadixCache(PAGE), Listener(), list(range(1, 400))
    assert cache.observe(listener)
    locked = []
    for _ in range(150):
        kind = dice.choice(["insert", "insert", "insert", "match", "evict", "unlock", "clear"])
        ids = np.array([dice.randrange(3) for _ in range(2 * dice.randrange(1, 7))], np.int64)
        salt = dice.choice(TENANTS)
        if kind == "insert":
            pages = np.array([free.pop() for _ in range(len(ids) // PAGE)], np.int64)
            result = cache.insert(ids, pages, salt, 0)
            free += result.duplicate_pages.tolist()
            if dice.random() < 0.3:
                cache.lock(result.node)
                locked.append(result.node)
        elif kind == "match":
            cache.match(ids, len(ids), salt)
        elif kind == "evict":
            free += cache.evict(dice.randrange(4)).tolist()
        elif kind == "clear" and dice.random() < 0.2:
            free += cache.clear().tolist()
        elif kind == "unlock" and locked:
            cache.unlock(locked.pop(dice.randrange(len(locked))))
        assert listener.known == told_afresh(cache)
        assert len(listener.known) == cache.cached_pages
        for page, (salt, path) in listener.known.items():
            assert cache.match(np.array(path, np.int64), len(path), salt).pages[-1] == page
    cache.check_integrity()


def test_nobody_is_told_once_nobody_listens() -> None:
    cache, listener = RadixCache(PAGE), Listener()
    cache.observe(listener)
    cache.insert(np.arange(4), np.array([1, 2]), "", 0)
    cache.observe(None)
    cache.insert(np.arange(10, 14), np.array([3, 4]), "", 0)
    cache.clear()
    assert set(listener.known) == {1, 2}


def test_contents_are_of_one_namespace_and_stay_as_they_were() -> None:
    cache = RadixCache(PAGE)
    cache.insert(np.arange(8), np.array([1, 2, 3, 4]), "", 0)
    cache.insert(np.arange(8), np.array([5, 6, 7, 8]), "other", 0)
    (before,) = cache.contents("")
    cache.insert(np.array([0, 1, 9, 9]), np.array([9, 10]), "", 0)  # splits the edge
    cache.clear()
    assert (before.parent, before.ids.tolist(), before.pages.tolist()) == (0, list(range(8)), [1, 2, 3, 4])
    assert cache.contents("") == cache.contents("nobody") == []


def test_a_cache_that_keeps_nothing_says_so() -> None:
    cache = NoPrefixCache(PAGE)
    assert not cache.observe(Listener()) and cache.contents("") == []
