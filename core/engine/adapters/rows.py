"""Which adapter each running row uses. Host side: it brings changed slots and groups of tokens into every step."""

from __future__ import annotations

import numpy as np

from core.engine.adapters.table import AdapterTable
from core.memory.companion import AdmissionFacts
from core.models.lora.slots import LORA, NONE_SLOT, LoraWrites, group_tokens
from core.types.arrays import Ints
from core.types.stats import PoolStats


class AdapterRows:
    """A `Companion` without a pool of its own: slots belong to names, in `table`, and no request waits for one.

    A request has its slot from its entry to its end, with or without a row, and the table counts it for as long.
    """

    name = LORA

    def __init__(self, table: AdapterTable, num_rows: int) -> None:
        self._table = table
        self._slots: Ints = np.full(num_rows, NONE_SLOT, np.int64)
        """int64[num_rows]: adapter slot by request row."""

    def slots_of(self, rows: Ints) -> Ints:
        """int64[n]: the adapter slot of each of `rows`."""
        return self._slots[rows]

    def resumable(self, pages: Ints) -> int:
        """All `pages`: the salt of a request keeps prefixes of different adapters apart in the cache."""
        return len(pages)

    def fits_alone(self, total_tokens: int, encoder_tokens: int) -> bool:
        """True: a request brings its slot, so its row takes nothing here."""
        return True

    def can_admit(self, facts: AdmissionFacts) -> bool:
        """True: a request brings its slot, so its row takes nothing here."""
        return True

    def would_admit(self, facts: AdmissionFacts, leaving: Ints) -> bool:
        """True: a request brings its slot, so its row takes nothing here."""
        return True

    def admitted(self, row: int, facts: AdmissionFacts) -> None:
        """Note the slot that the owner of `row` brings."""
        self._slots[row] = facts.adapter_slot

    def planned(
        self, rows: Ints, prefix_lens: Ints, extend_lens: Ints, pages: Ints, ahead: Ints | None = None
    ) -> LoraWrites | None:
        """Slots that changed since the last step, and the step's token places by slot; None if there is neither.

        Where drafts may be computed too, the places are those of a step without, and the device side groups again.
        """
        row_slots, slots = self.slots_of(rows), self._table.take_writes()
        groups = group_tokens(row_slots, extend_lens)
        return LoraWrites(slots, groups, int(extend_lens.sum()), row_slots) if groups or slots else None

    def released(self, row: int) -> None:
        """Note that `row` has no adapter until its next owner is admitted."""
        self._slots[row] = NONE_SLOT

    def replaced(self, pages: Ints, originals: Ints) -> None:
        """Nothing: no state here belongs to pages."""

    def freed(self, pages: Ints) -> None:
        """Nothing: no state here belongs to pages."""

    def stats(self) -> tuple[PoolStats, ...]:
        """Empty: adapters hold bytes and no places of a pool; the table counts the bytes."""
        return ()

    def check_integrity(self) -> None:
        """Recount the table; raises InvariantViolation naming what is off."""
        self._table.check_integrity()
