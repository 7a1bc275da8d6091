"""Tests of what only newer packages do are skipped with older ones, and with no others."""

from __future__ import annotations

import pytest

from tests.support import newer
from tests.support.newer import NEWER, Need, listed, too_old


def test_a_line_is_a_package_a_version_and_a_test() -> None:
    assert listed("# a comment\n\ntorch 2.13 tests/a.py::b[c, d]\n") == {"tests/a.py::b[c, d]": Need("torch", "2.13")}


@pytest.mark.parametrize(
    ("installed", "why"), [("{}", None), ("{}.1", None), ("{}+cpu", None), ("1.99", "needs {} {}")]
)
def test_skipped_where_the_package_is_older(installed: str, why: str | None) -> None:
    for test, need in NEWER.items():
        found = too_old(test, lambda package, need=need: installed.format(need.version))  # type: ignore[misc]
        assert found == (why and why.format(*need))
    assert too_old("tests/another.py::test", lambda package: "0") is None


def test_a_line_without_a_case_is_for_all_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(newer, "NEWER", {"tests/a.py::b": Need("torch", "2.13")})
    assert too_old("tests/a.py::b[c, d]", lambda package: "2.12") == "needs torch 2.13"
    assert too_old("tests/a.py::bc", lambda package: "2.12") is None
