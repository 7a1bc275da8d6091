"""Which recurrent state slots are free and which request holds which. Host side of the "mamba" pool."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from core.invariants import check
from core.types.arrays import Ints
from core.types.stats import PoolStats

NAME = "mamba"


@dataclass(frozen=True, slots=True)
class StateWrites:
    """Requests that got a slot since the last step: `rows[i]` now maps to `slots[i]`, which must be cleared first."""

    rows: Ints
    slots: Ints


class StateSlots:
    """Slots 1..size, one per running request; slot 0 is padding and never leaves (law 6). A `Companion`.

    The number of slots has nothing to do with the number of request rows: a request is admitted when both have room.
    Keeps no snapshots, so no cached prefix is resumable: a state cannot be rolled back, nor rebuilt from pages.
    """

    name = NAME

    def __init__(self, size: int, num_rows: int) -> None:
        check("state_slot_conservation", size >= 1, size=size)
        self.size = size
        self._slot_of: Ints = np.zeros(num_rows, np.int64)
        """By request row, 0 for none. Invariant: non-zero entries are distinct and disjoint from `_free`."""
        self._free = list(range(size, 0, -1))
        self._fresh: dict[int, int] = {}
        """Row -> slot of requests whose first step is not planned yet."""

    @property
    def available(self) -> int:
        """Slots that could be handed out now."""
        return len(self._free)

    def slot_of(self, row: int) -> int:
        """The slot of the request in `row`; 0 when it has none."""
        return int(self._slot_of[row])

    def resumable(self, pages: Ints) -> int:
        """See `Companion`."""
        return 0

    def fits_alone(self, total_tokens: int) -> bool:
        """A state is of one size however long the sequence."""
        return True

    def can_admit(self, tokens: int, cached: Ints) -> bool:
        """See `Companion`."""
        return bool(self._free)

    def admitted(self, row: int, tokens: int, cached: Ints) -> None:
        """See `Companion`."""
        check("row_padding_reserved", row > 0, row=row)
        check("state_slot_conservation", self._slot_of[row] == 0, row=row, held=int(self._slot_of[row]))
        check("state_slot_conservation", bool(self._free), row=row)
        self._slot_of[row] = self._fresh[row] = self._free.pop()

    def planned(self, rows: Ints, prefix_lens: Ints, extend_lens: Ints, pages: Ints) -> StateWrites | None:
        """The slots given out since the last step, for every one of which the mapping changes and the state is old."""
        if not self._fresh:
            return None
        fresh, self._fresh = self._fresh, {}
        return StateWrites(np.array(list(fresh.keys()), np.int64), np.array(list(fresh.values()), np.int64))

    def released(self, row: int) -> None:
        """See `Companion`. A second release, or one of a row without a slot, is an invariant violation."""
        slot = int(self._slot_of[row])
        check("state_slot_double_free", slot > 0, row=row)
        self._slot_of[row] = 0
        self._fresh.pop(row, None)
        self._free.append(slot)

    def freed(self, pages: Ints) -> None:
        """Nothing is kept for pages."""

    def stats(self) -> tuple[PoolStats, ...]:
        """Slots held by running requests."""
        return (PoolStats(NAME, self.size, self.size - len(self._free)),)

    def check_integrity(self) -> None:
        """Recompute the partition into free and held slots; raises InvariantViolation naming what is off."""
        held = self._slot_of[self._slot_of > 0].tolist()
        check("row_padding_reserved", self._slot_of[0] == 0, slot=int(self._slot_of[0]))
        every = sorted([*self._free, *held])
        check("state_slot_conservation", every == list(range(1, self.size + 1)), free=len(self._free), held=len(held))
