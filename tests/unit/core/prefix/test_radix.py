"""The tree itself: splits under locks, order of eviction, tenants, and what its counters catch."""

from __future__ import annotations

import numpy as np
import pytest

from core.invariants import InvariantViolation
from core.prefix import radix
from core.prefix.node import PrefixNode
from core.prefix.radix import RadixCache, shared_pages


def letters(text: str) -> np.ndarray:
    """One token, and with page size 1 one page, per letter."""
    return np.frombuffer(text.encode(), np.uint8).astype(np.int64)


def put(cache: RadixCache, text: str, first_page: int, salt: str = "") -> PrefixNode:
    """Insert `text` as pages first_page, first_page + 1, … as far as the cache lacks them."""
    node = cache.insert(letters(text), np.arange(first_page, first_page + len(text)), salt, 0).node
    assert node is not None
    return node


def found(cache: RadixCache, text: str, salt: str = "") -> list[int]:
    return cache.match(letters(text), len(text), salt).pages.tolist()


def held(cache: RadixCache, text: str, salt: str = "") -> int:
    """Pages held of `text`, asked without touching it."""
    return cache.peek(letters(text), len(text), salt)


def test_divergence_splits_and_both_branches_stay() -> None:
    cache = RadixCache(1)
    put(cache, "abcd", 1)
    put(cache, "abxy", 11)
    put(cache, "ab", 21)
    assert found(cache, "abcd") == [1, 2, 3, 4]
    assert found(cache, "abxy") == [1, 2, 13, 14]
    assert found(cache, "abq") == [1, 2]
    assert cache.cached_pages == 6
    cache.check_integrity()


def test_a_handle_from_before_a_split_protects_exactly_its_prefix() -> None:
    cache = RadixCache(1)
    node = put(cache, "abcdef", 1)
    cache.lock(node)
    cache.match(letters("abc"), 3, "")  # splits the locked node
    put(cache, "abcxyz", 11)
    assert cache.locked_pages == 6
    assert sorted(cache.clear()) == [14, 15, 16]
    assert found(cache, "abcdef") == [1, 2, 3, 4, 5, 6]
    cache.check_integrity()
    cache.unlock(node)
    assert cache.locked_pages == 0
    cache.check_integrity()


def test_a_shorter_lock_after_the_split_lets_the_tail_go() -> None:
    cache = RadixCache(1)
    whole = put(cache, "abcdef", 1)
    cache.lock(whole)
    part = cache.match(letters("abxx"), 4, "").node
    cache.lock(part)
    cache.unlock(whole)
    assert cache.locked_pages == 2
    assert sorted(cache.clear()) == [3, 4, 5, 6]
    cache.unlock(part)
    assert sorted(cache.clear()) == [1, 2]
    cache.check_integrity()


def test_locks_are_counted_through_repeated_splits() -> None:
    cache = RadixCache(1)
    node = put(cache, "abcdefgh", 1)
    for _ in range(3):
        cache.lock(node)
    for cut in (6, 4, 2):
        cache.match(letters("abcdefgh"), cut, "")
    for left in (2, 1, 0):
        cache.unlock(node)
        assert cache.locked_pages == (8 if left else 0)
        cache.check_integrity()


def test_tenants_never_see_each_other_and_leave_nothing_behind() -> None:
    cache = RadixCache(1)
    for tenant in range(50):
        assert found(cache, "abc", salt=f"t{tenant}") == []
        put(cache, "abc", 1 + 3 * tenant, salt=f"t{tenant}")
    assert cache.namespaces == 50
    assert found(cache, "abc", salt="t7") == [22, 23, 24]
    assert cache.clear().size == 150
    assert cache.namespaces == 0
    cache.check_integrity()


def test_asking_for_unknown_salts_costs_no_memory() -> None:
    cache = RadixCache(1)
    for tenant in range(100):
        match = cache.match(letters("abc"), 3, f"t{tenant}")
        cache.lock(match.node)
        cache.unlock(match.node)
    assert cache.namespaces == 0


def test_a_handle_of_an_empty_prefix_outlives_its_namespace() -> None:
    cache = RadixCache(1)
    put(cache, "abc", 1)
    handle = cache.match(letters("zzz"), 3, "").node
    cache.lock(handle)
    cache.clear()
    put(cache, "abc", 4)
    cache.unlock(handle)
    assert found(cache, "abc") == [4, 5, 6]
    cache.check_integrity()


def test_the_least_recently_used_goes_first() -> None:
    cache = RadixCache(1)
    put(cache, "ab", 1)
    put(cache, "cd", 3)
    put(cache, "ef", 5)
    found(cache, "ab")
    assert sorted(cache.evict(2)) == [3, 4]
    assert sorted(cache.evict(2)) == [5, 6]
    assert sorted(cache.evict(2)) == [1, 2]


def test_peek_is_not_a_use() -> None:
    cache = RadixCache(1)
    put(cache, "ab", 1)
    put(cache, "cd", 3)
    assert held(cache, "ab") == 2
    assert sorted(cache.evict(2)) == [1, 2]


def test_unlocking_is_a_use() -> None:
    cache = RadixCache(1)
    node = put(cache, "ab", 1)
    cache.lock(node)
    put(cache, "cd", 3)
    cache.unlock(node)
    assert sorted(cache.evict(2)) == [3, 4]


def test_a_parent_is_as_old_as_its_own_last_use() -> None:
    cache = RadixCache(1)
    put(cache, "sysone", 1)
    put(cache, "other", 11)
    found(cache, "sys")  # the shared head is young, its only tail is the oldest of all
    assert sorted(cache.evict(3)) == [4, 5, 6]
    assert sorted(cache.evict(5)) == [11, 12, 13, 14, 15]
    assert found(cache, "sys") == [1, 2, 3]


def test_eviction_trims_tails_and_takes_no_more_than_asked() -> None:
    cache = RadixCache(1)
    put(cache, "abcdefgh", 1)
    assert sorted(cache.evict(3)) == [6, 7, 8]
    assert held(cache, "abcdefgh") == 5
    assert sorted(cache.evict(1)) == [5]
    put(cache, "xyz", 11)
    assert sorted(cache.evict(5)) == [1, 2, 3, 4, 13]
    assert held(cache, "xyz") == 2
    cache.check_integrity()


@pytest.mark.parametrize("count", [0, -1])
def test_evicting_nothing_does_nothing(count: int) -> None:
    cache = RadixCache(1)
    put(cache, "abc", 1)
    assert cache.evict(count).size == 0
    assert held(cache, "abc") == 3


def test_eviction_gives_what_there_is() -> None:
    cache = RadixCache(1)
    cache.lock(put(cache, "ab", 1))
    put(cache, "abcd", 11)
    assert cache.evictable_pages == 2
    assert sorted(cache.evict(99)) == [13, 14]


def test_equal_hashes_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """All first pages land in one bucket; equality must decide on the bytes."""

    class Colliding(bytes):
        def __hash__(self) -> int:
            return 1

    real = radix.page_key
    monkeypatch.setattr(radix, "page_key", lambda data, at, size: Colliding(real(data, at, size)))
    cache = RadixCache(1)
    for page, letter in enumerate("abcdefghij", start=1):
        put(cache, letter + "z", 2 * page)
    for page, letter in enumerate("abcdefghij", start=1):
        assert found(cache, letter + "z") == [2 * page, 2 * page + 1]
    assert found(cache, "kz") == []


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_pages_that_differ_in_one_token_are_different(page_size: int) -> None:
    base = np.arange(4 * page_size, dtype=np.int64)
    for place in range(base.size):
        changed = base.copy()
        changed[place] += 2**40  # beyond 32 bits: ids are compared in full
        shared = shared_pages(base.tobytes(), changed.tobytes(), 0, 8 * page_size)
        assert shared == place // page_size


def test_new_pages_may_have_any_number() -> None:
    cache = RadixCache(1)
    cache.insert(letters("ab"), np.array([5_000_000, 3]), "", 0)
    assert sorted(cache.clear()) == [3, 5_000_000]


@pytest.mark.parametrize(
    ("field", "check"),
    [("_cached", "page_conservation"), ("_locked", "prefix_lock_balance")],
)
def test_integrity_notices_a_wrong_counter(field: str, check: str) -> None:
    cache = RadixCache(1)
    cache.lock(put(cache, "abc", 1))
    cache.check_integrity()
    setattr(cache, field, getattr(cache, field) + 1)
    with pytest.raises(InvariantViolation, match=check):
        cache.check_integrity()


@pytest.mark.parametrize(
    ("damage", "check"),
    [
        (lambda node: setattr(node, "locks", node.locks + 1), "prefix_lock_balance"),
        (lambda node: setattr(node, "holds", 0), "prefix_lock_balance"),
        (lambda node: setattr(node, "pages", node.pages[:1]), "prefix_page_alignment"),
        (lambda node: setattr(node, "dead", True), "page_conservation"),
        (lambda node: setattr(node, "parent", None), "page_conservation"),
        (lambda node: setattr(node, "pages", node.pages * 0), "page_conservation"),
        (lambda node: setattr(node, "key", node.key[::-1]), "prefix_page_alignment"),
    ],
)
def test_integrity_notices_a_damaged_node(damage, check: str) -> None:
    cache = RadixCache(1)
    node = put(cache, "abc", 1)
    cache.lock(node)
    damage(node)
    with pytest.raises(InvariantViolation, match=check):
        cache.check_integrity()


def test_integrity_notices_a_wrong_order_of_age() -> None:
    cache = RadixCache(1)
    put(cache, "abcd", 1)
    found(cache, "ab")
    cache.check_integrity()
    (tenant,) = cache._tenants
    tenant.recent.move_to_end(next(iter(tenant.recent)))
    with pytest.raises(InvariantViolation, match="prefix_lock_balance"):
        cache.check_integrity()


def test_integrity_notices_a_page_in_two_places() -> None:
    cache = RadixCache(1)
    put(cache, "ab", 1)
    other = put(cache, "cd", 3)
    other.pages = np.array([3, 1])
    with pytest.raises(InvariantViolation, match="page_conservation"):
        cache.check_integrity()


def test_integrity_notices_a_recent_node_that_left_the_tree() -> None:
    cache = RadixCache(1)
    put(cache, "ab", 1)
    (tenant,) = cache._tenants
    tenant.recent[PrefixNode.root("")] = None
    with pytest.raises(InvariantViolation, match="prefix_lock_balance"):
        cache.check_integrity()
