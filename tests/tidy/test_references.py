"""What documents and code point at exists: files, tests by name; laws, decisions and bugs by number."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from tests.support.repository import ROOT

DECISIONS = ROOT / "core" / "decisions"
BUGS = ROOT / "docs" / "explanation" / "simulation.md"
DOCUMENTS = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "core" / "LAWS.md"]
TEXTS = [path for room in ("core", "service", "tests", "docs", "helm") for path in sorted((ROOT / room).rglob("*.*"))]
CITED = re.compile(r"\b(laws?|decisions?) (\d+)(?:(?: and |, | to )(\d+))?", re.IGNORECASE)
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


def titles() -> dict[int, str]:
    """Of the decisions, by number, as each page has it."""
    first = (path.read_text().partition("\n")[0] for path in sorted(DECISIONS.glob("0*.md")))
    return {int(number): title for number, title in (line.removeprefix("# ").split(". ", 1) for line in first)}


def laws() -> list[int]:
    return [
        int(number) for number in re.findall(r"^## (\d+)\. ", (ROOT / "core" / "LAWS.md").read_text(), re.MULTILINE)
    ]


def cited_in_vain(text: str) -> list[str]:
    """Numbers of laws and decisions in `text` that there are none of."""
    known = {"l": set(laws()), "d": set(titles())}
    return [
        f"{word} {number}"
        for word, *numbers in CITED.findall(text)
        for number in numbers
        if number and int(number) not in known[word[0].lower()]
    ]


@cache
def bugs() -> dict[int, str]:
    """What the list of bugs says of each number."""
    rows = re.findall(r"^\| D(\d+) \|(.*)$", BUGS.read_text(), re.MULTILINE)
    return {int(number): row for number, row in rows}


def unlisted_bugs(text: str) -> list[str]:
    """Numbers of bugs in `text`, as `D7` or in the name of a test, that the list has not."""
    cited = re.findall(r"\bD(\d{1,2})\b|\btest_d(\d\d)_", text)
    return sorted({f"D{int(a or b)}" for a, b in cited if int(a or b) not in bugs()})


def test_bugs_that_are_cited_are_listed_and_their_tests_exist() -> None:
    known = bugs()
    assert list(known) == list(range(1, len(known) + 1)) and len(known) >= 36
    texts = (path for path in TEXTS if path.suffix in (".py", ".md") and path != Path(__file__))
    vain = {str(path.relative_to(ROOT)): unlisted_bugs(path.read_text()) for path in texts}
    assert {name: found for name, found in vain.items() if found} == {}
    # Tests that the list names without a file.
    tests = (ROOT / "tests" / "proofs" / "sim" / "test_bug_list.py").read_text()
    there = re.findall(r"^def (\w+)", tests, re.MULTILINE)
    assert [
        name for row in known.values() for name in re.findall(r"`(test_d\d\d_\w+)`", row) if name not in there
    ] == []


def test_laws_and_decisions_that_are_cited_exist() -> None:
    assert laws() == list(range(1, len(laws()) + 1))
    texts = (path for path in TEXTS if path.suffix in (".py", ".md", ".yaml"))
    vain = {str(path.relative_to(ROOT)): cited_in_vain(path.read_text()) for path in texts if path != Path(__file__)}
    assert {name: found for name, found in vain.items() if found} == {}


def test_the_list_of_decisions_is_that_of_the_pages() -> None:
    listed = re.findall(
        r"^\| \[(\d+)\]\((\d{4}-[\w-]+\.md)\) \| (.+) \|$", (DECISIONS / "README.md").read_text(), re.MULTILINE
    )
    assert {int(number): title for number, _, title in listed} == titles()
    assert [name for _, name, _ in listed] == sorted(path.name for path in DECISIONS.glob("0*.md"))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_documents_point_at_what_exists(document: Path) -> None:
    assert dangling(document.read_text()) == []


def test_the_rule_can_fail() -> None:
    assert cited_in_vain("law 4, decision 34; laws 1 and 3") == []
    assert cited_in_vain("law 15, Decision 23, laws 1 and 99") == ["law 15", "Decision 23", "laws 99"]
    assert unlisted_bugs("D36, D99 and test_d01_a, test_d88_b; 3D, D") == ["D88", "D99"]
    own = "tests/tidy/test_references.py"
    assert dangling(f"`{own}::test_the_rule_can_fail` and `core/INVARIANTS.md`") == []
    assert dangling(f"`{own}::test_the_rule` and `core/none.md`") == [f"{own}::test_the_rule", "core/none.md"]
