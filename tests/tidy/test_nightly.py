"""What `make test` leaves out exists, and nothing that a mutant is killed by is left out."""

from __future__ import annotations

import ast

import pytest

from tests.proofs.mutants.catalogue import MUTANTS
from tests.support.newer import NEWER
from tests.support.nightly import NIGHTLY, listed
from tests.support.repository import ROOT


def missing(tests: frozenset[str]) -> list[str]:
    """Those of `tests` whose file has no such function, or no such class."""
    functions: dict[str, set[str]] = {}
    for test in tests:
        path = test.partition("::")[0]
        if path not in functions:
            text = (ROOT / path).read_text() if (ROOT / path).is_file() else ""
            defined = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
            functions[path] = {node.name for node in ast.walk(ast.parse(text)) if isinstance(node, defined)}
    return sorted(test for test in tests if test.partition("[")[0].split("::")[1] not in functions[test.split("::")[0]])


def kills(tests: frozenset[str]) -> list[str]:
    """Those of `tests` that a mutant names: itself, all cases of its function, or all of its file."""
    named = {mutant.test for mutant in MUTANTS}
    spelled = {test: {test, test.partition("[")[0], test.partition("::")[0]} for test in tests}
    whole = {name.partition("[")[0] for name in named}
    return sorted(test for test, names in spelled.items() if names & named or ("[" not in test and test in whole))


def test_each_is_there_and_none_kills_a_mutant() -> None:
    assert len(NIGHTLY) > 100
    assert missing(NIGHTLY) == []
    assert kills(NIGHTLY) == []
    assert missing(frozenset(NEWER)) == []


def test_the_rules_can_fail() -> None:
    here = "tests/tidy/test_nightly.py::test_the_rules_can_fail"
    gone = {"tests/tidy/test_nightly.py::test_gone[1]", "tests/gone.py::test"}
    assert missing(frozenset({here, *gone})) == sorted(gone)
    killer = next(mutant.test for mutant in MUTANTS if "[" in mutant.test)
    assert kills(frozenset({here, killer, killer.partition("[")[0]})) == sorted({killer, killer.partition("[")[0]})


@pytest.mark.parametrize("text", ["# a comment\n\ntests/a.py::b[c d]\n"])
def test_comments_are_no_tests(text: str) -> None:
    assert listed(text) == {"tests/a.py::b[c d]"}
