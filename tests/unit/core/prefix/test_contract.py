"""What every prefix cache must do, whichever make: the caller's page accounting depends on nothing else.

For the no-op cache the namespace is that of one request's samples, the only place where it holds anything.
"""

from __future__ import annotations

import numpy as np
import pytest

from core.errors import ConfigError
from core.invariants import InvariantViolation
from core.prefix.base import PrefixCache, group_salt
from core.prefix.registry import PREFIX_CACHES, build_prefix_cache

SALT = group_salt("17")
PAGE_SIZES = (1, 16)


@pytest.fixture(params=[(name, size) for name in PREFIX_CACHES for size in PAGE_SIZES], ids=str)
def cache(request: pytest.FixtureRequest) -> PrefixCache:
    name, page_size = request.param
    return build_prefix_cache(name, page_size)


def tokens(cache: PrefixCache, text: str) -> np.ndarray:
    """One page of ids per letter; two letters differ in the last id of their page only."""
    pages = [[7] * (cache.page_size - 1) + [ord(letter)] for letter in text]
    return np.array(pages, np.int64).reshape(-1)


def numbers(*pages: int) -> np.ndarray:
    return np.array(pages, np.int64)


def test_the_registry_knows_exactly_what_the_flag_takes() -> None:
    assert set(PREFIX_CACHES) == {"radix", "none"}
    with pytest.raises(ConfigError, match="lru"):
        build_prefix_cache("lru", 16)


@pytest.mark.parametrize(("name", "kept"), [("radix", 2), ("none", 0)])
def test_what_ended_is_kept_by_the_cache_that_was_asked_for(name: str, kept: int) -> None:
    cache = build_prefix_cache(name, 1)
    cache.insert(tokens(cache, "ab"), numbers(1, 2), cache.namespace("tenant", None), 0)
    assert cache.cached_pages == kept


def test_an_empty_cache_matches_nothing_and_its_handle_can_be_locked(cache: PrefixCache) -> None:
    match = cache.match(tokens(cache, "abc"), 10_000, SALT)
    assert match.pages.size == 0 and match.pages.dtype == np.int64
    cache.lock(match.node)
    assert cache.unlock(match.node).size == 0
    assert (cache.cached_pages, cache.locked_pages, cache.evictable_pages) == (0, 0, 0)
    cache.check_integrity()


def test_insert_adopts_what_is_missing_and_match_finds_it(cache: PrefixCache) -> None:
    result = cache.insert(tokens(cache, "abc"), numbers(5, 3, 9), SALT, 0)
    assert result.adopted == 3 and result.duplicate_pages.size == 0
    assert cache.match(tokens(cache, "abcd"), 10_000, SALT).pages.tolist() == [5, 3, 9]
    assert cache.match(tokens(cache, "abd"), 10_000, SALT).pages.tolist() == [5, 3]
    assert cache.match(tokens(cache, "xbc"), 10_000, SALT).pages.size == 0
    cache.check_integrity()


def test_a_match_takes_whole_pages_within_the_limit(cache: PrefixCache) -> None:
    ids, size = tokens(cache, "abc"), cache.page_size
    cache.insert(ids, numbers(5, 3, 9), SALT, 0)
    assert cache.match(ids, 3 * size - 1, SALT).pages.tolist() == [5, 3]
    assert cache.match(ids, 2 * size, SALT).pages.tolist() == [5, 3]
    assert cache.match(ids[: 2 * size + size // 2], 10_000, SALT).pages.tolist() == [5, 3]
    for nothing in (0, -1, size - 1):
        assert cache.match(ids, nothing, SALT).pages.size == 0
    cache.check_integrity()


def test_peek_counts_what_match_would_find_and_changes_nothing(cache: PrefixCache) -> None:
    ids, size = tokens(cache, "abc"), cache.page_size
    cache.lock(cache.insert(ids, numbers(5, 3, 9), SALT, 0).node)
    assert cache.peek(tokens(cache, "abz"), 10_000, SALT) == 2 * size
    assert cache.peek(ids, 2 * size, SALT) == 2 * size
    assert cache.peek(ids, 10_000, group_salt("18")) == 0
    cache.check_integrity()


def test_a_tail_short_of_a_page_is_not_offered(cache: PrefixCache) -> None:
    ids = np.append(tokens(cache, "ab"), np.int64(99))
    result = cache.insert(ids, numbers(1, 2), SALT, 0)
    assert result.adopted == 2 and cache.cached_pages == 2


def test_locked_prefixes_outlive_eviction_and_are_freed_once(cache: PrefixCache) -> None:
    node = cache.insert(tokens(cache, "abc"), numbers(5, 3, 9), SALT, 0).node
    cache.lock(node)
    assert cache.locked_pages == 3 and cache.evictable_pages == 0
    assert cache.evict(3).size == 0 and cache.clear().size == 0
    dropped = cache.unlock(node)
    assert sorted([*dropped, *cache.clear()]) == [3, 5, 9]
    assert cache.cached_pages == 0 and cache.match(tokens(cache, "abc"), 10_000, SALT).pages.size == 0
    cache.check_integrity()


def test_pages_that_are_held_under_other_numbers_are_duplicates(cache: PrefixCache) -> None:
    first = cache.insert(tokens(cache, "abc"), numbers(1, 2, 3), SALT, 0)
    cache.lock(first.node)
    second = cache.insert(tokens(cache, "abxy"), numbers(11, 12, 13, 14), SALT, 0)
    assert second.duplicate_pages.tolist() == [11, 12] and second.adopted == 2
    assert second.original_pages.tolist() == [1, 2]
    assert cache.match(tokens(cache, "abxy"), 10_000, SALT).pages.tolist() == [1, 2, 13, 14]
    cache.check_integrity()


def test_offering_again_adopts_nothing_and_reports_the_same_duplicates(cache: PrefixCache) -> None:
    ids = tokens(cache, "abc")
    cache.lock(cache.insert(ids[: cache.page_size], numbers(1), SALT, 0).node)
    for adopted in (2, 0):
        result = cache.insert(ids, numbers(11, 2, 3), SALT, 0)
        assert result.adopted == adopted and result.duplicate_pages.tolist() == [11]
    grown = cache.insert(ids, numbers(11, 2, 3), SALT, cache.page_size)
    assert grown.adopted == 0 and grown.duplicate_pages.size == 0
    assert cache.cached_pages == 3
    cache.check_integrity()


def test_duplicates_below_owned_from_were_reported_before(cache: PrefixCache) -> None:
    cache.lock(cache.insert(tokens(cache, "ab"), numbers(1, 2), SALT, 0).node)
    result = cache.insert(tokens(cache, "abc"), numbers(1, 12, 13), SALT, cache.page_size)
    assert (result.duplicate_pages.tolist(), result.original_pages.tolist(), result.adopted) == ([12], [2], 1)


def test_the_callers_array_may_change_afterwards(cache: PrefixCache) -> None:
    pages = numbers(4, 5)
    cache.lock(cache.insert(tokens(cache, "ab"), pages, SALT, 0).node)
    pages[:] = 0
    found = cache.match(tokens(cache, "ab"), 10_000, SALT).pages
    found[:] = 0
    assert cache.match(tokens(cache, "ab"), 10_000, SALT).pages.tolist() == [4, 5]


def test_nothing_offered_is_fine(cache: PrefixCache) -> None:
    result = cache.insert(tokens(cache, "a"), numbers(), SALT, 0)
    assert result.adopted == 0 and result.duplicate_pages.size == 0
    cache.lock(result.node)
    cache.unlock(result.node)
    cache.check_integrity()


def test_unlock_without_lock_is_caught(cache: PrefixCache) -> None:
    node = cache.insert(tokens(cache, "ab"), numbers(1, 2), SALT, 0).node
    with pytest.raises(InvariantViolation, match="prefix_lock_balance"):
        cache.unlock(node)
    cache.lock(node)
    cache.unlock(node)
    with pytest.raises(InvariantViolation, match="prefix_lock_balance"):
        cache.unlock(node)


def test_locking_what_was_evicted_is_caught(cache: PrefixCache) -> None:
    node = cache.insert(tokens(cache, "ab"), numbers(1, 2), SALT, 0).node
    assert cache.evict(1).tolist() == [2]
    with pytest.raises(InvariantViolation, match="prefix_lock_balance"):
        cache.lock(node)


def test_bad_offers_are_caught_before_anything_changes(cache: PrefixCache) -> None:
    ids = tokens(cache, "abc")
    cache.lock(cache.insert(ids, numbers(1, 2, 3), SALT, 0).node)
    twin = tokens(cache, "abz")
    bad = (
        ("prefix_page_alignment", ids, numbers(1, 2, 3, 4), 0),  # more pages than tokens
        ("prefix_page_alignment", ids, numbers(1, 2), 3 * cache.page_size),  # owns more than it offers
        ("prefix_page_alignment", ids, numbers(1, 2), -cache.page_size),
        ("prefix_lock_balance", tokens(cache, "zzz"), numbers(7, 8, 9), cache.page_size),  # claims what is not held
        ("page_padding_reserved", twin, numbers(1, 2, 0), 0),
        ("page_conservation", twin, numbers(1, 2, 3), 0),  # page 3 is held, with other tokens
        ("page_conservation", tokens(cache, "xy"), numbers(8, 8), 0),
    )
    for name, words, pages, owned_from in bad:
        with pytest.raises(InvariantViolation, match=name):
            cache.insert(words, pages, SALT, owned_from)
    if cache.page_size > 1:
        with pytest.raises(InvariantViolation, match="prefix_page_alignment"):
            cache.insert(ids, numbers(1, 2, 3), SALT, 1)
    assert cache.cached_pages == cache.locked_pages == 3
    cache.check_integrity()
