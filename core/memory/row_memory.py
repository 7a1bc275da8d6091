"""What requests hold of a model that keeps nothing of its tokens between two steps: an encoder of whole texts."""

from __future__ import annotations

from typing import Any

from core.memory.request_memory import RequestMemory
from core.memory.seat import Seat
from core.types.arrays import Ints


class RowMemory(RequestMemory):
    """A row each, and no pages: there are no keys and values to be in them.

    Pages took a third of what the host does for a short text.
    """

    def fits_alone(self, total_tokens: int, encoder_tokens: int = 0) -> bool:
        """Always: how long a text may be is the model's affair."""
        return True

    def would_admit(self, ids: Ints, salt: str, reserve_pages: int, leaving: Ints, **_: Any) -> int | None:
        """0 where a row is free once those of `leaving` are, else None."""
        return 0 if self.rows.available or len(leaving) else None

    def admit(self, ids: Ints, salt: str, reserve_pages: int, **_: Any) -> Seat | None:
        """A row; None, and no change, where none is free."""
        taken = self.rows.alloc()
        return None if taken is None else Seat(*taken, 0)

    def takes(self, row: int) -> bool:
        """Never: there is nothing to keep."""
        return False

    def release(self, row: int, generation: int, ids: Ints) -> None:
        """Give back `row`."""
        self.rows.free(row, generation)

    def vouch(self, row: int, tokens: int) -> None:
        """Nothing: no page depends on it."""
