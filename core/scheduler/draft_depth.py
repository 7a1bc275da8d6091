"""How many drafts a step verifies: the policy that the planner asks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Depth(Protocol):
    """Loop thread only."""

    def drafts(self, rows: int) -> int:
        """The most drafts that each row verifies in a step of `rows` decode rows; 0 for none."""
        ...


@dataclass(frozen=True, slots=True)
class FixedDepth:
    """The same number in every step."""

    count: int

    def drafts(self, rows: int) -> int:
        """`count`, whatever `rows` is."""
        return self.count
