"""A sample of the mutants dies, and the whole catalogue still fits the code. `make mutants` tries them all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants.catalogue import MUTANTS, SAMPLE
from tests.mutants.mutant import ROOT, Verdict, Workshop


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("workshop"))


def test_every_mutant_still_applies() -> None:
    assert len(MUTANTS) >= 30 and len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    for mutant in MUTANTS:
        source = (ROOT / mutant.file).read_text()
        applied = mutant.applied(source)
        if mutant.file.endswith(".py"):
            compile(applied, mutant.file, "exec")
        test_file, _, test_name = mutant.test.partition("::")
        assert test_name.partition("[")[0] in Path(ROOT, test_file).read_text(), mutant


@pytest.mark.parametrize("name", SAMPLE)
def test_sampled_mutants_are_killed(workshop: Workshop, name: str) -> None:
    (mutant,) = (each for each in MUTANTS if each.name == name)
    assert workshop.try_one(mutant) is Verdict.KILLED, f"{mutant.test} does not notice that {mutant.breaks!r} is broken"


def test_an_unbroken_copy_passes(workshop: Workshop) -> None:
    """The killing is the mutant's doing, not the workshop's."""
    assert workshop.passes("tests/scheduler/test_scheduler.py::test_row_reused_while_the_old_owner_is_in_flight")
