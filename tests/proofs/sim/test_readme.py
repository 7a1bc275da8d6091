"""The page of the simulation names tests, mutants and bugs; all of them exist, and none is left out."""

from __future__ import annotations

import re

from tests.support.repository import ROOT
from tests.tidy.source import python

TEXT = (ROOT / "docs" / "explanation" / "simulation.md").read_text()
SOURCES = {source.path: source.text for source in python("tests")}
OURS = SOURCES["tests/proofs/sim/test_bug_list.py"]


def test_every_bug_has_a_line() -> None:
    assert re.findall(r"^\| (D\d+) \|", TEXT, re.MULTILINE) == [f"D{number}" for number in range(1, 37)]


def test_what_it_names_exists() -> None:
    for name in re.findall(r"`(test_d\d\d_\w+)`", TEXT):
        assert f"def {name}(" in OURS, name
    for path, name in re.findall(r"`(tests/[\w/.]+)::(\w+)`", TEXT):
        assert f"def {name}(" in SOURCES[path], f"{path}::{name}"
    mutants = "".join(text for path, text in SOURCES.items() if path.startswith("tests/proofs/sim/mutants_of"))
    for name in re.findall(r"mutant `(\w+)`", TEXT):
        assert f"def {name}(" in mutants, name


def test_no_test_of_a_bug_is_left_out() -> None:
    assert set(re.findall(r"def (test_d\d\d_\w+)", OURS)) <= set(re.findall(r"`(test_d\d\d_\w+)`", TEXT))
