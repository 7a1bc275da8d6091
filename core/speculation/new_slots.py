"""Which slots of a step have another owner from now on, so that a drafter can forget what it kept of the former one.

Where a drafter leaves out tokens, its keys there would be those of the page's former owner, of another tenant perhaps,
and how fast drafts are right would depend on them.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from core.batch.schedule_batch import ScheduleBatch
from core.types.arrays import Ints

NOTHING_NEW: Final = np.iinfo(np.int64).max


def new_slots(batch: ScheduleBatch) -> Ints:
    """int64[n]: slots of pages that rows of `batch` got to write to; those that they found again are not among them."""
    writes, chunks = batch.table_writes, batch.num_extend
    rows, positions, slots = writes.tokens()
    if len(rows) == 0:
        return slots
    known: Ints = np.full(int(max(rows.max(), batch.rows.max())) + 1, NOTHING_NEW)
    # Before a chunk stand tokens of the row itself or found ones, before a decode the least that may be there.
    known[batch.rows[:chunks]] = batch.prefix_lens[:chunks]
    known[batch.rows[chunks:]] = batch.lower_lens
    found: Ints = slots[positions >= known[rows]]
    return found
