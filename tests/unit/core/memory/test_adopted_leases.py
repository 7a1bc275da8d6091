"""A lease of pages that were cached before it began keeps those, and none that the cache takes later."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.core.memory.test_request_memory import PAGE, admit, ids, make


@pytest.mark.parametrize("offered", [True, False])
def test_what_is_cached_behind_a_lease_is_not_locked_by_it(offered: bool) -> None:
    """Two pages are lent; two more come to the cache by an offer, or when their row is given back."""
    memory = make()
    owner = admit(memory, ids(4 * PAGE))
    memory.offer(owner.row, ids(2 * PAGE))
    lease = memory.lend(owner.row, 2 * PAGE)
    if offered:
        memory.offer(owner.row, ids(4 * PAGE))
    memory.release(owner.row, owner.generation, ids(4 * PAGE))
    memory.check_integrity()
    assert memory.cache.cached_pages == 4 and memory.cache.evictable_pages == 2
    memory.reclaim(lease)
    assert memory.cache.evictable_pages == 4
    assert len(np.unique(memory.cache.evict(4))) == 4
