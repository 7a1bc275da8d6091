"""The no-op cache: nothing outlives a request, and the samples of one request share all the same."""

from __future__ import annotations

import numpy as np
import pytest

from core.invariants import InvariantViolation
from core.prefix.base import GROUP_MARK, group_salt
from core.prefix.none import NoPrefixCache
from core.prefix.radix import RadixCache

IDS = np.arange(64, dtype=np.int64)
PAGES = np.array([1, 2, 3, 4], np.int64)


def test_outside_groups_nothing_is_kept_and_every_page_stays_the_callers() -> None:
    cache = NoPrefixCache(16)
    result = cache.insert(IDS, PAGES, "tenant", 0)
    assert result.node is None and result.adopted == 0 and result.duplicate_pages.size == 0
    assert cache.match(IDS, 64, "tenant").pages.size == 0
    assert cache.peek(IDS, 64, "tenant") == 0
    assert cache.cached_pages == cache.evictable_pages == 0


def test_claiming_pages_that_it_never_took_is_caught() -> None:
    with pytest.raises(InvariantViolation, match="prefix_lock_balance"):
        NoPrefixCache(16).insert(IDS, PAGES, "tenant", 16)


def test_samples_share_their_prompt_until_the_last_one_ends() -> None:
    cache = NoPrefixCache(16)
    salt = cache.namespace("tenant", "41")
    first = cache.insert(IDS, PAGES, salt, 0)
    assert first.node is not None
    cache.lock(first.node)
    second = cache.match(IDS, 63, salt)
    assert second.pages.tolist() == [1, 2, 3]
    cache.lock(second.node)
    assert cache.unlock(first.node).tolist() == [4]
    assert sorted(cache.unlock(second.node)) == [1, 2, 3]
    assert cache.cached_pages == 0
    cache.check_integrity()


def test_groups_do_not_see_each_other() -> None:
    cache = NoPrefixCache(16)
    node = cache.insert(IDS, PAGES, group_salt("1"), 0).node
    assert node is not None
    cache.lock(node)
    assert cache.match(IDS, 64, group_salt("2")).pages.size == 0
    assert cache.match(IDS, 64, group_salt("1")).pages.size == 4


def test_what_was_inserted_and_never_locked_goes_with_the_next_unlock() -> None:
    cache = NoPrefixCache(16)
    salt = group_salt("1")
    handle = cache.match(IDS, 64, salt).node
    cache.lock(handle)
    cache.insert(IDS, PAGES, salt, 0)
    assert sorted(cache.unlock(handle)) == [1, 2, 3, 4]
    assert cache.cached_pages == 0


def test_a_clients_salt_cannot_name_a_group() -> None:
    none, radix = NoPrefixCache(16), RadixCache(16)
    assert none.namespace(group_salt("1"), None) != group_salt("1")
    assert not none.namespace(group_salt("1"), None).startswith(GROUP_MARK)
    assert none.namespace("tenant", "5") == group_salt("5")
    assert radix.namespace("tenant", "5") == radix.namespace("tenant", None) == "tenant"


def test_it_says_of_which_namespaces_it_keeps_anything() -> None:
    cache = NoPrefixCache(16)
    assert cache.takes(cache.namespace("a", "g")) and not cache.takes(cache.namespace("a", None))
    assert RadixCache(16).takes("")
