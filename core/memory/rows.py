"""Which request rows are free, and the generation of each. Host state only: planning reads it while a step computes."""

from __future__ import annotations

import numpy as np

from core.invariants import check
from core.types.arrays import Ints


class RowAllocator:
    """Hands out rows 1..size; row 0 is padding and never leaves (law 6).

    A row's owner is identified by (row, generation) (law 1). The generation grows when the row is freed, so results of
    a former owner no longer match from that moment on, even before the row has a new owner. The row freed last is
    handed out first: its memory is warm, and a bug that mixes two owners shows soonest.
    """

    def __init__(self, size: int) -> None:
        check("row_alloc_free_list", size >= 1, size=size)
        self.size = size
        self.generations: Ints = np.zeros(size + 1, np.int64)
        """By row: the generation of its owner, or while it is free that of its next owner."""
        self._held = np.zeros(size + 1, np.bool_)
        # Invariant: free rows and held rows are disjoint and together are exactly 1..size.
        self._free = list(range(size, 0, -1))

    @property
    def available(self) -> int:
        """Rows that `alloc` could hand out now."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Rows that have an owner."""
        return self.size - len(self._free)

    def alloc(self) -> tuple[int, int] | None:
        """A row and its owner's generation, or None when all are taken; None changes nothing."""
        if not self._free:
            return None
        row = self._free.pop()
        check("row_padding_reserved", row > 0, row=row)
        check("row_alloc_free_list", not self._held[row], row=row)
        self._held[row] = True
        return row, int(self.generations[row])

    def free(self, row: int, generation: int) -> None:
        """End the ownership (row, generation). Raises InvariantViolation if it is not current, as on a second free."""
        check("row_padding_reserved", 0 < row <= self.size, row=row)
        check("row_double_free", bool(self._held[row]), row=row, generation=generation)
        check("row_foreign_generation", int(self.generations[row]) == generation, row=row, generation=generation)
        self._held[row] = False
        # Here and not in `alloc`: a late result must find no owner while the row is free, either.
        self.generations[row] += 1
        self._free.append(row)

    def is_current(self, rows: Ints, generations: Ints) -> np.ndarray:
        """bool[n]: whether each pair (rows[i], generations[i]), int64[n] both, is still the owner of its row."""
        current: np.ndarray = self.generations[rows] == generations
        return current

    def is_owner(self, row: int, generation: int) -> bool:
        """Whether (`row`, `generation`) is still the owner of its row."""
        return bool(self.generations[row] == generation)

    def check_integrity(self) -> None:
        """Recompute the partition into free and held rows; raises InvariantViolation naming what is off."""
        free = np.zeros(self.size + 1, np.bool_)
        free[self._free] = True
        check("row_padding_reserved", not free[0] and not self._held[0])
        check("row_conservation", int(free.sum()) == len(self._free), free=len(self._free))
        check("row_conservation", bool((free ^ self._held)[1:].all()), free=len(self._free), held=int(self._held.sum()))
