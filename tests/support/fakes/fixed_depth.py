"""A policy of drafts that never changes its mind."""

from __future__ import annotations

from dataclasses import dataclass

from core.batch.result import StepResult
from core.batch.spec_plan import Aim


@dataclass(frozen=True, slots=True)
class FixedDepth:
    """The same number in every step, however unlikely they are."""

    count: int

    def aim(self, rows: int) -> Aim:
        """`count`, whatever `rows` is."""
        return Aim(self.count)

    def observe(self, result: StepResult) -> None:
        """Changes nothing."""
