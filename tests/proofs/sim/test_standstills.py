"""Seeds played again with pauses and exchanged weights: nothing that was computed before is read afterwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.proofs.sim.mutants import Patch
from tests.proofs.sim.mutants_of_standstills import OF_STANDSTILLS
from tests.proofs.sim.scenario import draw
from tests.proofs.sim.story import Hits, Story, Violation
from tests.proofs.sim.world import World

SEEDS, STEPS = 60, 60


def play(seed: int, hits: Hits, steps: int = STEPS) -> None:
    World(replace(draw(seed), standstills=True), Story(), hits).run(steps)


@pytest.mark.parametrize(("oracle", "apply"), OF_STANDSTILLS, ids=lambda each: getattr(each, "__name__", each))
def test_the_mutant_is_seen(oracle: str, apply: Callable[[Patch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    apply(monkeypatch)
    for seed in range(100):
        try:
            play(seed, Hits())
        except Violation as violation:
            assert violation.oracle == oracle, violation
            return
    raise AssertionError(f"{apply.__name__} survives")


def test_nothing_of_the_old_weights_is_read(seed: int) -> None:
    hits, base = Hits(), seed << 12
    print(f"seeds {base} to {base + SEEDS - 1}")
    for each in range(base, base + SEEDS):
        try:
            play(each, hits)
        except AssertionError as error:
            raise AssertionError(f"seed {each}: {error}") from error
    assert hits.counts["start_over"] > 0 and hits.counts["pause"] > 0, hits.table()
