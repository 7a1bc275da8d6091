"""Memory that is short takes from the prefix cache exactly what it is short of: the oldest prefixes, and no more."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.core.memory.test_request_memory import admit, ids, make

PAGE = 4


def kept(pages: int, start: int = 0) -> np.ndarray:
    """A prompt of so many whole pages."""
    return ids(pages * PAGE, start)


@pytest.mark.parametrize("short", [1, 2, 3])
def test_admission_evicts_only_the_pages_it_is_short_of(short: int) -> None:
    memory = make(pages=8)
    for start in (0, 100):
        row = admit(memory, kept(3, start))
        memory.release(row.row, row.generation, kept(3, start))
    assert (memory.allocator.available, memory.cache.cached_pages) == (2, 6)
    newcomer = admit(memory, kept(2 + short, 200))
    assert (memory.allocator.available, memory.cache.cached_pages) == (0, 6 - short)
    assert newcomer.cached_tokens == 0
    limit = 3 * PAGE
    assert memory.cache.peek(kept(3), limit, "") == (3 - short) * PAGE, "the oldest gives way, from its end"
    assert memory.cache.peek(kept(3, 100), limit, "") == limit, "the younger stays whole"


def test_decode_evicts_only_the_pages_it_is_short_of() -> None:
    memory = make(pages=8)
    row = admit(memory, kept(4))
    memory.release(row.row, row.generation, kept(4))
    rows = np.array([admit(memory, kept(1, start)).row for start in (100, 200, 300)])
    assert (memory.allocator.available, memory.cache.cached_pages) == (1, 4)
    assert memory.grow(rows)
    assert (memory.allocator.available, memory.cache.cached_pages) == (0, 2)
    memory.check_integrity()


def test_what_fits_evicts_nothing_and_what_cannot_fit_neither() -> None:
    memory = make(pages=8)
    row = admit(memory, kept(4))
    memory.release(row.row, row.generation, kept(4))
    assert memory.admit(kept(9, 100), "", 0) is None
    assert memory.admit(kept(4, 100), "", 5) is None, "the pages that must stay obtainable are not"
    assert memory.cache.cached_pages == 4
    admit(memory, kept(4, 100), reserve=4)
    assert memory.cache.cached_pages == 4, "what is reserved stays obtainable, and is not taken yet"
