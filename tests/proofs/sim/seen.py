"""The seed at which each mutant was seen first, in `seen.txt`: it is played before the others, which take minutes.

A seed means what the simulation draws from it: after a change there it may show nothing, and the others follow.
`python -m tests.proofs.sim --seen` plays all of them and writes the file anew.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.proofs.sim.mutants import MUTANTS, Mutant
from tests.proofs.sim.scenario import REAL_STEPS, STEPS, draw
from tests.proofs.sim.sweep import play
from tests.proofs.sim.world import Outcome

FILE = Path(__file__).with_name("seen.txt")
WITHIN = 100
"""Seeds until a mutant must have been seen."""


def known() -> dict[str, int]:
    """The seed of each mutant in the file."""
    return {name: int(seed) for name, seed in (line.split() for line in FILE.read_text().splitlines())}


def seeds(mutant: Mutant) -> Iterator[int]:
    """The seeds that may show a mutant, in order; the first `WITHIN` of them must.

    Where only the production step can show it, seeds that run the twin would prove nothing.
    """
    if mutant.seeds:
        yield from mutant.seeds
        return
    first: Iterable[int] = itertools.count(7, REAL_STEPS) if mutant.real else itertools.count()
    if mutant.policy:
        first = (seed for seed in first if draw(seed).config.policy == mutant.policy)
    if mutant.drafts:
        first = (seed for seed in first if draw(seed).drafts is not None)
    yield from itertools.islice(first, WITHIN)


def first_seen(mutant: Mutant, before: Iterable[int] = ()) -> Outcome | None:
    """Play seeds, those in `before` first, until one fails; None if none does. The mutant has been applied."""
    for seed in itertools.chain(before, seeds(mutant)):
        outcome = play(seed, None if mutant.seeds else STEPS)
        if outcome.oracle:
            return outcome
    return None


def write() -> None:
    """Find the seeds of all mutants that need several, and write the file."""
    lines = []
    for mutant in MUTANTS:
        if mutant.scene is None and not mutant.seeds:
            with pytest.MonkeyPatch.context() as patch:
                mutant.apply(patch)
                outcome = first_seen(mutant)
            print(
                mutant.name, "survives" if outcome is None else f"{outcome.oracle} at seed {outcome.seed}", flush=True
            )
            lines += [] if outcome is None else [f"{mutant.name} {outcome.seed}\n"]
    FILE.write_text("".join(lines))
