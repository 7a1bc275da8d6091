"""Which adapter each running row has: the host side that brings groups of tokens and changed slots into every step."""

from __future__ import annotations

import numpy as np

from core.engine.adapters.table import AdapterTable
from core.memory.companion import AdmissionFacts
from core.models.lora.slots import LORA, NONE_SLOT, LoraWrites, group_tokens
from core.types.arrays import Ints
from core.types.stats import PoolStats


class AdapterRows:
    """A `Companion` without a pool of its own: slots follow names, in the books of `table`, and nobody waits for one.

    A request has its slot from entry to end, whether it has a row or not, and the table counts it for as long.
    """

    name = LORA

    def __init__(self, table: AdapterTable, num_rows: int) -> None:
        self._table = table
        self._slots: Ints = np.full(num_rows, NONE_SLOT, np.int64)
        """By request row."""

    def slots_of(self, rows: Ints) -> Ints:
        """int64[n]: the adapter slot of each of `rows`."""
        return self._slots[rows]

    def resumable(self, pages: Ints) -> int:
        """All: the prefix cache keeps keys and values of adapters apart by salt."""
        return len(pages)

    def fits_alone(self, total_tokens: int, encoder_tokens: int) -> bool:
        """Nothing is taken here."""
        return True

    def can_admit(self, facts: AdmissionFacts) -> bool:
        """Nothing is taken here."""
        return True

    def would_admit(self, facts: AdmissionFacts, leaving: Ints) -> bool:
        """Nothing is taken here."""
        return True

    def admitted(self, row: int, facts: AdmissionFacts) -> None:
        """See `Companion`."""
        self._slots[row] = facts.adapter_slot

    def planned(self, rows: Ints, prefix_lens: Ints, extend_lens: Ints, pages: Ints) -> LoraWrites | None:
        """Slots that changed since the last step, and the step's token places by slot."""
        groups, slots = group_tokens(self.slots_of(rows), extend_lens), self._table.take_writes()
        return LoraWrites(slots, groups, int(extend_lens.sum())) if groups or slots else None

    def released(self, row: int) -> None:
        """See `Companion`."""
        self._slots[row] = NONE_SLOT

    def replaced(self, pages: Ints, originals: Ints) -> None:
        """Nothing here belongs to pages."""

    def freed(self, pages: Ints) -> None:
        """Nothing here belongs to pages."""

    def stats(self) -> tuple[PoolStats, ...]:
        """None: what adapters hold is bytes, which the table tells."""
        return ()

    def check_integrity(self) -> None:
        """See `AdapterTable.check_integrity`."""
        self._table.check_integrity()
