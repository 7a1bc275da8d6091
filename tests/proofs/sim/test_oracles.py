"""The oracles see what they are for: production code broken on purpose is reported within a few seeds.

An oracle that no mutant needs may be dead; a mutant that no oracle sees says which one is missing. Seeds are fixed, so
it is always the same oracle that speaks first.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.proofs.sim import (
    mutants_of_adapters,
    mutants_of_backstops,
    mutants_of_cross,
    mutants_of_draft_states,
    mutants_of_drafts,
    mutants_of_measures,
    mutants_of_memory,
    mutants_of_poison,
    mutants_of_progress,
    mutants_of_requests,
    mutants_of_shares,
    mutants_of_states,
    mutants_of_windows,
)
from tests.proofs.sim.mutants import MUTANTS, Mutant
from tests.proofs.sim.mutants_of_leases import OF_LEASES
from tests.proofs.sim.mutants_of_standstills import OF_STANDSTILLS
from tests.proofs.sim.scenes import (
    a_prefix_is_shared,
    every_row_is_taken,
    neighbours_come_and_go,
    pages_run_out,
    the_device_is_ahead,
    two_long_prompts,
    two_tenants_wait,
    younger_ones_pass,
)
from tests.proofs.sim.seen import first_seen, known
from tests.proofs.sim.story import Violation
from tests.tidy.source import python

MODULES = (
    mutants_of_adapters,
    mutants_of_backstops,
    mutants_of_cross,
    mutants_of_draft_states,
    mutants_of_drafts,
    mutants_of_measures,
    mutants_of_memory,
    mutants_of_progress,
    mutants_of_poison,
    mutants_of_requests,
    mutants_of_shares,
    mutants_of_states,
    mutants_of_windows,
)
SEEN = known()
BACKSTOPS: dict[str, str] = {
    "unread_token": "the books are closed only after everything else was found in order",
    "relay_check": "the ledger speaks earlier",
    "queue_bound": "the bound is kept by the door of the engine, and what is queued twice is in two places",
    "leak": "owners of rows, pages and locks are compared after every step, so a leak shows before everybody has left",
    "liveness": "who does not move is seen as wedged, who moves in vain as preempted for ever, work undone as left out",
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_mutant_is_seen(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.apply(monkeypatch)
    if mutant.scene is not None:
        with pytest.raises(Violation) as seen:
            mutant.scene()
        assert seen.value.oracle in mutant.seen_by
        return
    outcome = first_seen(mutant, [SEEN[mutant.name]] if mutant.name in SEEN else ())
    assert outcome is not None, f"{mutant.name} survives"
    print(f"{mutant.name}: {outcome.text[:100]!r} by {outcome.oracle} at seed {outcome.seed}")
    assert outcome.oracle in mutant.seen_by


SCENES = (
    *(a_prefix_is_shared, every_row_is_taken, pages_run_out, the_device_is_ahead),
    *(neighbours_come_and_go, two_long_prompts, two_tenants_wait, younger_ones_pass),
)


@pytest.mark.parametrize("scene", SCENES)
def test_nothing_is_wrong_with_the_scenes(scene: Callable[[], None]) -> None:
    scene()


def test_every_oracle_is_needed() -> None:
    # The shell has oracles and mutants of its own.
    ours = [source for source in python("tests") if source.path.startswith("tests/proofs/sim/")]
    sources = [source for source in ours if not source.path.startswith("tests/proofs/sim/shell/")]
    oracles = {name for source in sources for name in re.findall(r"Violation\(\s*\"(\w+)\"", source.text)}
    needed = {name.split(":")[0] for mutant in MUTANTS for name in mutant.seen_by}
    needed |= {oracle for oracle, _ in (*OF_LEASES, *OF_STANDSTILLS)}
    assert oracles, "the pattern finds them"
    assert oracles <= needed, "oracles that no mutant needs"


@pytest.mark.parametrize("backstop", BACKSTOPS)
def test_every_backstop_fires(backstop: str) -> None:
    """For each there is a mutant that nothing else sees first; that it is seen is one of the tests above."""
    assert any(mutant.seen_by == (backstop,) for mutant in MUTANTS)


def test_mutants_have_names_and_words() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 40
    for module in MODULES:
        assert module.__doc__
