"""Drawn seeds played again with one more thing switched on, which no seed draws by itself: transfers, standstills."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from tests.proofs.sim.mutants import Patch
from tests.proofs.sim.scenario import draw
from tests.proofs.sim.story import Hits, Story, Violation
from tests.proofs.sim.world import World

STEPS = 60
TRIED = 100
"""Seeds within which a mutant has to be seen."""


@dataclass(frozen=True, slots=True)
class Replay:
    """Plays of `seeds` neighbours, each of STEPS steps, with the switch of `Scenario` of that name.

    Every second one has the switches `beside` as well.
    """

    switch: str
    seeds: int
    beside: tuple[str, ...] = ()

    def play(self, seed: int, hits: Hits) -> None:
        """One play. Raises what an oracle or an invariant of the product does."""
        switches = (self.switch, *(self.beside if seed % 2 else ()))
        World(replace(draw(seed), **dict.fromkeys(switches, True)), Story(), hits).run(STEPS)

    def check_mutant(self, oracle: str, apply: Callable[[Patch], None], patch: pytest.MonkeyPatch) -> None:
        """Some seed ends, and the first that does by `oracle`."""
        apply(patch)
        for seed in range(TRIED):
            try:
                self.play(seed, Hits())
            except Violation as violation:
                assert violation.oracle == oracle, violation
                return
        raise AssertionError(f"{apply.__name__} survives")

    def check(self, seed: int) -> Hits:
        """Neighbours that `seed` names end well; returns what they went through."""
        hits, base = Hits(), seed << 12
        print(f"seeds {base} to {base + self.seeds - 1}")
        for each in range(base, base + self.seeds):
            try:
                self.play(each, hits)
            except AssertionError as error:
                raise AssertionError(f"seed {each}: {error}") from error
        return hits
