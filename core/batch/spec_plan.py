"""How far the decode rows of one step may run ahead on drafts: tokens that were guessed, and that the step verifies."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from core.types.arrays import Ints


@dataclass(frozen=True, slots=True)
class TextSeed:
    """All that is known of a sequence which got row `row`: `ids`, int64[n], prompt first.

    Text of one `scope` may be used to guess text of the same scope only: how fast a guess is right tells what was said
    before, and tenants must not learn that of each other.
    """

    row: int
    scope: str
    ids: Ints
    origin: int = 0
    """Where the counter of its random numbers stands at length 0, for `core.sampling.uniform.uniforms`."""


@dataclass(frozen=True, slots=True)
class Aim:
    """Which drafts are worth their time. What a drafter cannot tell the chance of, it may propose all the same."""

    most: int
    """The most for each row."""
    worth: float = 0.0
    """Chance, 0 to 1: a draft that is less likely to be right costs more tokens than it brings."""
    least: float = 0.0
    """Tokens: what a step loses by verifying drafts at all. If those of all rows together are expected to bring less,
    none is proposed."""


NO_DRAFTS: Final = Aim(0)


@dataclass(frozen=True, slots=True)
class SpecPlan:
    """The plan's part of speculation, for n decode rows; int64[n] each. How many drafts there are, the device knows."""

    drafts: Ints
    """The most drafts that each row verifies; all 0 in a step that verifies none."""
    limits: Ints
    """The most tokens that each row may ever have in the pools: a draft beyond is not verified."""
    aim: Aim
    """What to propose behind this step, for the rows that sample in it."""
    seeds: tuple[TextSeed, ...] = ()
    """Of rows with a new owner whose drafts may be verified."""
    exact: bool = False
    """Whether the plan's lengths are those on the device: no draft is in doubt, and none is verified."""
    verifies: bool = field(init=False)
    """Whether some row may have drafts to verify."""

    def __post_init__(self) -> None:
        # Of so few numbers, counting takes a fifth of the time that `any` takes.
        object.__setattr__(self, "verifies", np.count_nonzero(self.drafts) > 0)
