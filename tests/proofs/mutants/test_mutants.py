"""A sample of the mutants dies, and the whole catalogue still fits the code. `make mutants` tries them all."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.proofs.mutants.catalogue import MUTANTS, SAMPLE, TABLES, read, table_of
from tests.proofs.mutants.mutant import Verdict
from tests.proofs.mutants.workshop import Workshop
from tests.support.repository import ROOT


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    made = Workshop(tmp_path_factory.mktemp("workshop"))
    yield made
    made.close()


def test_every_mutant_still_applies() -> None:
    assert len(MUTANTS) >= 30 and len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    text = cache(lambda file: (ROOT / file).read_text())
    for mutant in MUTANTS:
        mutant.applied(text(mutant.file))
        test_file, _, test_name = mutant.test.partition("::")
        assert test_name.partition("[")[0] in text(test_file), mutant


def test_every_table_has_the_mutants_of_its_room_in_order() -> None:
    for table in TABLES.iterdir():
        mutants = read(table)
        assert all(table_of(mutant.file) == table for mutant in mutants), table
        assert mutants == sorted(mutants, key=lambda mutant: (mutant.file, mutant.name)), table


def test_an_entry_with_a_wrong_field_is_told_with_its_table(tmp_path: Path) -> None:
    table = tmp_path / "core.relay.toml"
    table.write_text('[no-test]\nbreaks = "a law"\nfile = "core/relay/future_map.py"\nbefore = "a"\nafter = "b"\n')
    with pytest.raises(ValueError, match=r"core\.relay\.toml, \[no-test\]: .*'test'"):
        read(table)


@pytest.mark.parametrize("name", SAMPLE)
def test_sampled_mutants_are_killed(workshop: Workshop, name: str) -> None:
    (mutant,) = (each for each in MUTANTS if each.name == name)
    trial = workshop.try_one(mutant)
    assert trial.verdict is Verdict.KILLED, f"{mutant.test} does not assert {mutant.breaks!r}: {trial}"


def test_an_unbroken_copy_passes(workshop: Workshop) -> None:
    """The killing is the mutant's doing, not the workshop's."""
    assert workshop.passes(
        "tests/unit/core/scheduler/test_scheduler.py::test_row_reused_while_the_old_owner_is_in_flight"
    )
