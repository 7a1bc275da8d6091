"""Whose pages go when there are too few: each tenant keeps an equal share from others, and one alone may use all."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from core.prefix.base import PrefixCache
from core.prefix.radix import RadixCache
from core.prefix.tenants import tenant_of

PAGES, COMING = 120, 6
SHARE = (PAGES - COMING) // 2
"""Of two, when so many pages are to come free."""


class Shelf:
    """A cache of PAGES pages of one token each, filled as a pool would be: what does not fit is made room for."""

    def __init__(self) -> None:
        self.cache: PrefixCache = RadixCache(1)
        self.free = list(range(PAGES, 0, -1))
        self.prompts = 0

    def put(self, tenant: str, pages: int, salt: str = "") -> np.ndarray:
        """A new prompt of this tenant; its ids."""
        self.prompts += 1
        ids = np.arange(pages) + 1000 * self.prompts
        if pages > len(self.free):
            self.free += self.cache.evict(pages - len(self.free)).tolist()
        taken = np.array([self.free.pop() for _ in range(pages)])
        self.cache.insert(ids, taken, f"{tenant}\0{salt}", 0)
        self.cache.check_integrity()
        return ids

    def has(self, tenant: str, ids: np.ndarray, salt: str = "") -> int:
        """Pages of these that are still there; looking is no use of them."""
        return self.cache.peek(ids, len(ids), f"{tenant}\0{salt}")


def test_what_one_tenant_holds_below_its_share_no_other_takes() -> None:
    shelf = Shelf()
    hers = shelf.put("alice", SHARE)
    for number in range(15):
        shelf.put("bob", COMING, salt=str(number))
        shelf.cache.match(hers, len(hers), "alice\0")
    assert shelf.has("alice", hers) == SHARE, "a flood of one tenant takes what another uses"


def test_whoever_has_most_beyond_its_share_gives_up_first() -> None:
    shelf = Shelf()
    his = shelf.put("bob", PAGES - 20)
    hers = shelf.put("alice", 20)
    shelf.put("carol", 30)
    assert shelf.has("alice", hers) == 20 and shelf.has("bob", his) == PAGES - 50


def test_two_that_hold_as_much_give_up_as_much() -> None:
    """Beyond a share of what stays, not of what was there: else all of it would come from one."""
    shelf = Shelf()
    hers, his = shelf.put("alice", PAGES // 2), shelf.put("bob", PAGES // 2)
    shelf.put("carol", PAGES // 2)
    assert shelf.has("alice", hers) == shelf.has("bob", his) == PAGES // 4


def test_salts_of_one_tenant_are_not_shares_of_their_own() -> None:
    shelf = Shelf()
    hers = shelf.put("alice", SHARE)
    for number in range(25):
        shelf.put("bob", COMING, salt=str(number))
    assert shelf.has("alice", hers) == SHARE


def test_a_tenant_that_left_keeps_nothing_from_one_that_is_alone() -> None:
    shelf = Shelf()
    hers = shelf.put("alice", PAGES // 2)
    for _ in range(2 * PAGES // 10):
        shelf.put("bob", 10)
    assert shelf.has("alice", hers) == 0, "pages that nobody uses are kept for ever"
    last = [shelf.put("bob", 10) for _ in range(PAGES // 10)]
    assert all(shelf.has("bob", ids) == 10 for ids in last)


def test_of_two_that_left_the_one_unused_longest_gives_up_first() -> None:
    shelf = Shelf()
    hers, his = shelf.put("alice", 30), shelf.put("bob", 30)
    shelf.put("carol", PAGES - 60)
    shelf.put("carol", 5)
    shelf.cache.match(hers, len(hers), "alice\0")
    # The last one goes past the bound of both at once: before it, neither counts as gone.
    for _ in range(PAGES // 10):
        shelf.put("carol", 10)
    assert (shelf.has("alice", hers), shelf.has("bob", his)) == (30, 30)
    shelf.put("carol", 1)
    assert (shelf.has("alice", hers), shelf.has("bob", his)) == (30, 29)


def test_one_tenants_oldest_go_first() -> None:
    shelf = Shelf()
    prompts = [shelf.put("bob", 10) for _ in range(12)]
    shelf.cache.match(prompts[0], 10, "bob\0")
    shelf.put("bob", 20)
    assert [shelf.has("bob", ids) for ids in prompts[:4]] == [10, 0, 0, 10]


def test_a_flush_of_one_tenant_is_of_all_its_salts_and_of_nobody_else() -> None:
    shelf = Shelf()
    hers, more, his = shelf.put("alice", 10), shelf.put("alice", 10, "b"), shelf.put("bob", 10)
    locked = shelf.put("alice", 7)
    node = shelf.cache.match(locked, 7, "alice\0").node
    shelf.cache.lock(node)
    assert len(shelf.cache.clear("alice")) == 20
    shelf.cache.check_integrity()
    assert (shelf.has("alice", hers), shelf.has("alice", more, "b"), shelf.has("bob", his)) == (0, 0, 10)
    assert shelf.has("alice", locked) == 7
    assert len(shelf.cache.clear("nobody")) == 0
    shelf.cache.unlock(node)
    assert len(shelf.cache.clear()) == 17


@pytest.mark.parametrize(
    ("salt", "tenant"), [("", ""), ("a salt", ""), ("\0group\0x", ""), ("alice\0", "alice"), ("alice\0bob\0x", "alice")]
)
def test_a_tenant_is_what_stands_before_the_first_nul(salt: str, tenant: str) -> None:
    assert tenant_of(salt) == tenant


def test_random_tenants_keep_their_books(seed: int) -> None:
    chance, shelf = random.Random(seed), Shelf()
    held: Counter[str] = Counter()
    locked = []
    for _ in range(400):
        tenant = chance.choice("abcdefgh")
        if chance.random() < 0.3 and locked:
            shelf.cache.unlock(locked.pop(chance.randrange(len(locked))))
        elif chance.random() < 0.1:
            freed = shelf.cache.clear(tenant)
            shelf.free += freed.tolist()
        elif shelf.cache.evictable_pages + len(shelf.free) > 20:
            ids = shelf.put(tenant, chance.randint(1, 9), chance.choice(("", "x")))
            if chance.random() < 0.5 and len(locked) < 8:
                found = shelf.cache.match(ids, len(ids), f"{tenant}\0")
                shelf.cache.lock(found.node)
                locked.append(found.node)
        held[tenant] += 1
        shelf.cache.check_integrity()
        assert shelf.cache.cached_pages + len(shelf.free) == PAGES
    assert min(held.values()) > 0
