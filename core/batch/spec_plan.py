"""How far the decode rows of one step may run ahead on drafts: tokens that were guessed, and that the step verifies."""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class SpecPlan:
    """The plan's part of speculation, for n decode rows; int64[n] each. How many drafts there are, the device knows."""

    drafts: Ints
    """The most drafts that each row verifies; all 0 in a step that verifies none."""
    limits: Ints
    """The most tokens that each row may ever have in the pools: a draft beyond is not verified."""
    propose: int
    """The most drafts to propose behind this step, for each row that samples in it."""
    seeds: tuple[TextSeed, ...] = ()
    """Of rows with a new owner whose drafts may be verified."""
