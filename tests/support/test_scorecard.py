"""The scorecard: a figure is asserted as it is shown, and the table says what did not run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import scorecard as scores
from tests.support.repository import ROOT
from tests.support.scorecard import Scorecard, read
from tests.support.scorecard_rows import ROWS, UNCOVERED
from tests.support.scorecard_table import Lines, Planned, Score, Session, render, verdict

A, B, C = "tests/a.py::test", "tests/b.py::test", "tests/c.py::test"
DYNAMIC = {15, 16, 17, 20}
"""Rows whose tests look their number up."""


def score(row: int, metric: str, value: str, test: str = A, *, bound: str = "≤ 9", word: str = "PASS") -> Score:
    return Score(row, metric, value, bound, word, test, "2026-01-01")


def lines(*found: Score, outcomes: dict[str, str] | None = None, complete: bool = True, **tests: list[int]) -> Lines:
    """A run of the tests a, b and c, of which a name that ends in _soak is a long one."""
    planned = [
        Planned(f"tests/{name.removesuffix('_soak')}.py::test", rows, name.endswith("soak"))
        for name, rows in tests.items()
    ]
    ran = outcomes if outcomes is not None else {each.test: "passed" for each in found}
    return Lines(list(found), ran, [Session("a machine", "-q", complete, planned)])


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(scores.FILE_ENV, str(tmp_path / "scores"))
    return tmp_path / "scores"


def written(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("bound", "fine", "bad", "told"),
    [
        ({"at_most": 2}, 2.0, 2.5, "≤ 2"),
        ({"at_least": 0.9}, 0.9, 0.89, "≥ 0.9"),
        ({"equals": [0, 0]}, [0, 0], [0, 1], "= 0, 0"),
        ({"equals": {}}, {}, {"lost": 1}, "= {}"),
    ],
)
def test_a_bound_is_asserted_and_recorded(
    bound: dict[str, float], fine: object, bad: object, told: str, recorded: Path
) -> None:
    card = Scorecard(A)
    card(8, "figure", fine, **bound)
    with pytest.raises(
        AssertionError, match=re.escape(f"row 8: figure is {scores._shown(bad)}, which has to be {told}")
    ):
        card(8, "figure", bad, **bound)
    first, second = written(recorded)
    assert (first["bound"], first["verdict"]) == (told, "PASS")
    assert (second["bound"], second["verdict"], second["value"]) == (told, "FAIL", scores._shown(bad))
    assert card.bounds == 2


def test_the_ordinary_suite_has_the_wider_bound_and_the_table_the_narrow_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(scores.FILE_ENV, raising=False)
    Scorecard(A)(11, "ratio", 0.85, at_least=0.9, shared=0.8)
    with pytest.raises(AssertionError, match=re.escape("≥ 0.8")):
        Scorecard(A)(11, "ratio", 0.75, at_least=0.9, shared=0.8)
    monkeypatch.setenv(scores.FILE_ENV, str(tmp_path / "scores"))
    with pytest.raises(AssertionError, match=re.escape("≥ 0.9")):
        Scorecard(A)(11, "ratio", 0.85, at_least=0.9, shared=0.8)


def test_a_figure_without_a_bound_has_no_verdict(recorded: Path) -> None:
    scorecard = Scorecard(A)
    scorecard(1, "tokens/s", 1234)
    assert (written(recorded)[0]["bound"], written(recorded)[0]["verdict"]) == ("", "")
    scorecard(1, "seconds", 0.123456, at_most=1)
    assert written(recorded)[1]["value"] == "0.123"
    for wrong in ({"at_most": 1, "at_least": 1}, {"equals": 1, "shared": 2}, {"shared": 2}):
        with pytest.raises(AssertionError, match="one bound"):
            scorecard(1, "seconds", 1, **wrong)
    with pytest.raises(AssertionError, match="no row 99"):
        scorecard(99, "x", 1)


def test_every_row_has_a_verdict_or_says_that_it_has_no_test() -> None:
    text = render(lines(score(1, "lost", "0"), score(1, "lost", "0", B), a=[1], b=[1]))
    for row, (what, expected) in ROWS.items():
        (line,) = (line for line in text.splitlines() if line.startswith(f"| {row} | {what} |"))
        word = "PASS" if row == 1 else f"no test: {UNCOVERED[row]}" if row in UNCOVERED else "**not run**, 0 of 0 tests"
        assert line == f"| {row} | {what} | {expected} | {word} |"
    assert "| 1 | lost | 0 | ≤ 9 | PASS | `b.py::test` | 2026-01-01 |" in text


def test_rows_without_a_test_are_those_that_give_a_reason() -> None:
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if path != Path(__file__)]
    used = {int(row) for path in files for row in re.findall(r"scorecard\(\s*(\d+)", path.read_text())}
    assert used | DYNAMIC == set(ROWS) - set(UNCOVERED)


def test_one_bound_or_one_test_that_fails_fails_the_row() -> None:
    broken = lines(score(1, "lost", "0"), score(1, "late", "12", word="FAIL"), a=[1])
    assert verdict(1, broken) == "**FAIL**"
    outcomes = {A: "passed", B: "failed"}
    silent = lines(score(1, "lost", "0"), outcomes=outcomes, a=[1], b=[1])
    assert verdict(1, silent) == "**FAIL**", "it failed before it recorded anything"
    assert render(silent).endswith("## Failed in this run\n\n- `b.py::test`\n")


def test_a_row_whose_figures_are_not_bound_is_not_passed() -> None:
    assert verdict(1, lines(score(1, "tokens/s", "5", bound="", word=""), a=[1])) == "**not run**"


def test_what_did_not_run_is_said() -> None:
    outcomes = {A: "passed", C: "skipped: no browser"}
    found = lines(score(4, "lost", "0"), outcomes=outcomes, a=[4], b_soak=[4], c=[4])
    text = render(found)
    assert verdict(4, found) == "PASS, 1 of 3 tests"
    assert text.endswith("## Not run\n\n- `b.py::test`: `make soak` runs it\n- `c.py::test`: skipped: no browser\n")
    assert "**Partial**" not in text, "it looked for all there are"
    found = lines(score(4, "lost", "0"), outcomes={A: "passed"}, a=[4], b=[4])
    assert "**Partial**: 1 tests were left out" in render(found) and "- `b.py::test`: was left out" in render(found)


def test_a_run_that_was_given_paths_makes_a_partial_table() -> None:
    assert "**Partial**: made of `pytest -q`" in render(lines(score(1, "lost", "0"), complete=False, a=[1]))


def test_a_value_cannot_break_the_table() -> None:
    assert "a\\|b | c\\|d |" in render(lines(score(2, "a|b", "c|d")))


CONFTEST = """
import pytest
from tests.support import scorecard as scores
scorecard = scores.scorecard

@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    scores.note_session(config, scores.only_recording(items))

def pytest_runtest_makereport(item, call):
    scores.note_outcome(item, call)
"""
TESTS = """
import pytest
def test_good(scorecard):
    scorecard(1, "lost", 0, equals=0)
def test_bad(scorecard):
    scorecard(2, "lost", 1, equals=0)
def test_that_asserts_nothing(scorecard):
    scorecard(3, "speed", 1)
@pytest.mark.soak
def test_long(scorecard):
    scorecard(4, "lost", 0, equals=0)
@pytest.mark.skip(reason="no device")
def test_skipped(scorecard):
    scorecard(5, "lost", 0, equals=0)
def test_other():
    assert True
"""


@pytest.mark.parametrize("paths", [(), ("test_rows.py",)])
def test_a_run_leaves_what_the_table_needs(tmp_path: Path, recorded: Path, paths: tuple[str, ...]) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_rows.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text(
        f"[pytest]\ntestpaths = .\npythonpath = {ROOT}\nmarkers = soak\naddopts = -m 'not soak'\nasyncio_mode = auto\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *paths]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert "1 failed, 3 passed, 1 skipped, 1 deselected, 1 error in" in ran.stdout.replace("1 warning, ", ""), (
        ran.stdout
    )
    found = read([str(recorded)])
    tests = {name: f"test_rows.py::test_{name}" for name in ("good", "bad", "that_asserts_nothing", "long", "skipped")}
    assert found.outcomes == {
        tests["good"]: "passed",
        tests["bad"]: "failed",
        tests["that_asserts_nothing"]: "failed",
        tests["skipped"]: "skipped: no device",
    }
    (session,) = found.sessions
    assert session.complete == (not paths)
    assert {each.test: (each.rows, each.soak) for each in session.planned} == {
        test: ([row], row == 4) for row, test in enumerate(tests.values(), 1)
    }
    words = [verdict(row, found) for row in (1, 2, 3, 4, 5)]
    assert words == ["PASS", "**FAIL**", "**FAIL**", "**not run**, 0 of 1 tests", "**not run**, 0 of 1 tests"]
