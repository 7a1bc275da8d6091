"""Every mutant of the shell is seen, by an oracle that it names."""

from __future__ import annotations

import pytest

from tests.proofs.sim.shell.mutants import MUTANTS, ShellMutant, broken
from tests.proofs.sim.shell.sweep import play

ENOUGH = 40
"""Seeds that are played after the one that saw the mutant first, should that seed mean something else by now."""


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_seen(mutant: ShellMutant) -> None:
    with broken(mutant):
        found = next((seen for seen in map(play, (mutant.seed, *range(ENOUGH))) if seen.oracle), None)
    assert found is not None, f"nothing sees {mutant.name}"
    assert found.oracle.startswith(mutant.seen_by), f"SEED={found.seed}: {found.text}"


def test_there_are_mutants_of_every_room() -> None:
    rooms = {mutant.module.rpartition(".")[2] for mutant in MUTANTS}
    assert rooms >= {"async_engine", "output_processor", "token_stream", "pending_admissions", "reader_turns", "host"}
    assert rooms >= {"remote_engine", "remote_stream", "retention", "kept", "hold", "wire"} and len(MUTANTS) >= 12


def test_a_broken_function_is_mended_afterwards() -> None:
    mutant = next(each for each in MUTANTS if each.name == "call-given-up-early-stays")
    with broken(mutant):
        assert play(mutant.seed).oracle
    assert not play(mutant.seed).oracle
