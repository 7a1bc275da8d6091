"""What documents point at exists: files, and tests by name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.tidy.source import ROOT

DOCUMENTS = sorted((ROOT / "docs").rglob("*.md"))
PATH = re.compile(r"`((?:core|service|tests|helm|protos|docs)/[\w./-]+)(?:::(\w+))?`")


def dangling(text: str) -> list[str]:
    """References of `text` in backticks, `room/file` or `tests/file.py::test_name`, to what is not there."""
    found = []
    for path, test in PATH.findall(text):
        target = ROOT / path
        there = target.exists() and (
            not test or re.search(rf"^(async )?def {test}\b", target.read_text(), re.MULTILINE)
        )
        if not there:
            found.append(f"{path}::{test}" if test else path)
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_documents_point_at_what_exists(document: Path) -> None:
    assert dangling(document.read_text()) == []


def test_the_rule_can_fail() -> None:
    own = "tests/tidy/test_references.py"
    assert dangling(f"`{own}::test_the_rule_can_fail` and `core/INVARIANTS.md`") == []
    assert dangling(f"`{own}::test_the_rule` and `core/none.md`") == [f"{own}::test_the_rule", "core/none.md"]
