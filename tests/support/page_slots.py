"""Where the scheduler believes a token's KV to be: what the device's table must say too."""

from __future__ import annotations

from core.memory.request_memory import RequestMemory
from core.types.arrays import Ints


def slots_of(memory: RequestMemory, rows: Ints, positions: Ints) -> Ints:
    """int64[n]: the KV slot of each pair (rows[i], positions[i]), by the pages that the rows hold."""
    size = memory.page_size
    pages = memory._pages[rows, positions // size]
    slots: Ints = pages * size + positions % size
    return slots
