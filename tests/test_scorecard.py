"""The scorecard's file: one line per test, rows without a figure with their reason, nothing that breaks the table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import scorecard as scores
from tests.scorecard import Score, Scorecard, render
from tests.scorecard_rows import ROWS, UNCOVERED


def score(row: int, metric: str, value: str, test: str = "tests/a.py::test") -> Score:
    return Score(row, metric, value, test, "2026-01-01")


def test_every_row_is_in_the_file_once_with_figures_or_a_reason() -> None:
    scored = [score(1, "lost", "0"), score(1, "tokens/s", "9"), score(1, "lost", "0", "tests/b.py::test")]
    text = render(scored, "a machine")
    assert f"| 1 | {ROWS[1][0]} | {ROWS[1][1]} | lost: 0; tokens/s: 9 | `a.py::test` | 2026-01-01 |" in text
    assert "| 1 |  |  | lost: 0 | `b.py::test` | 2026-01-01 |" in text
    without = text.partition("## Rows without a figure")[2]
    for row, (what, _) in ROWS.items():
        assert (f"| {row} | {what} |" in without) == (row != 1)


def test_reasons_are_for_rows_that_exist() -> None:
    assert set(UNCOVERED) <= set(ROWS)


def test_a_test_that_failed_is_called_so() -> None:
    scored = [score(1, "lost", "3"), score(1, "lost", "0", "tests/b.py::test")]
    text = render(scored, "a machine", frozenset({"tests/a.py::test", "tests/c.py::test"}))
    assert text.endswith("## Failed in this run\n\n- `a.py::test`\n- `c.py::test`\n"), "also without a figure"
    assert "**failed** lost: 3 | `a.py" in text and "|  |  | lost: 0 | `b.py" in text


def test_a_value_cannot_break_the_table() -> None:
    assert "a\\|b: c\\|d" in render([score(2, "a|b", "c|d")], "a machine")


def test_values_go_to_the_file_and_to_the_output(
    scorecard: Scorecard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(scores.FILE_ENV, str(tmp_path / "scores"))
    scorecard(8, "seconds", 0.123456)
    assert capsys.readouterr().out == "scorecard row 8: seconds = 0.123\n"
    written = json.loads((tmp_path / "scores").read_text())
    assert (written["row"], written["metric"], written["value"]) == (8, "seconds", "0.123")
    assert written["test"].endswith("test_values_go_to_the_file_and_to_the_output")
    with pytest.raises(AssertionError, match="no row 99"):
        scorecard(99, "x", 1)
