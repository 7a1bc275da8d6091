"""A policy of drafts that never changes its mind."""

from __future__ import annotations

from dataclasses import dataclass

from core.batch.result import Accepted


@dataclass(frozen=True, slots=True)
class FixedDepth:
    """The same number in every step."""

    count: int

    def drafts(self, rows: int) -> int:
        """`count`, whatever `rows` is."""
        return self.count

    def observe(self, accepted: Accepted, seconds: float) -> None:
        """Changes nothing."""
