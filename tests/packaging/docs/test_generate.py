"""What the documents take from the code is what the code has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from core.errors import Overloaded, SlipstreamError
from docs import api_page, generate
from service.rpc.status import CODES
from tests.tidy.source import python

NAMED = re.compile(r'^(?:REASON|EXHAUSTED|\w*(?:LIMIT|WORK))(?:: Final)? = "([A-Z_]+)"$', re.MULTILINE)
GIVEN = re.compile(r'Overloaded\([^()]*reason="([A-Z_]+)"')
"""How the code says with what reason something is full."""
ERRORS = (generate.REFERENCE / "errors.md").read_text()


@pytest.mark.parametrize("path", generate.PAGES, ids=lambda path: path.stem)
def test_pages_are_as_new(path: Path) -> None:
    text = path.read_text()
    assert generate.renewed(text) == text, "run python -m docs.generate"


def test_every_part_has_its_place() -> None:
    marks = [name for path in generate.PAGES for name in re.findall(r"<!-- end of (\w+) -->", path.read_text())]
    assert sorted(marks) == sorted(generate.MADE)


def test_the_api_has_every_declaration_of_the_protos() -> None:
    made = api_page.text()
    for path in api_page.PROTOS.rglob("*.proto"):
        for name in re.findall(r"^ *(?:service|message|enum|rpc) (\w+)", path.read_text(), re.MULTILINE):
            assert re.search(rf"^#### {name}$|^### ([\w.]+\.)?{name}$", made, re.MULTILINE), name
        for name in re.findall(r"^ *(?:(?:repeated|optional) )?[\w.]+ (\w+) = \d+;", path.read_text(), re.MULTILINE):
            assert f"| `{name}` |" in made, name


def test_every_error_with_a_code_is_in_the_table() -> None:
    table = generate.errors_table()
    for kind in CODES:
        assert f"| `{kind.__name__}` | `{CODES[kind].name}` |" in table, kind
    assert f"`{SlipstreamError.__name__}`" not in table


def test_when_each_reason_is_told_is_said() -> None:
    """By the table that people wrote: one row for each reason that a call can end with."""
    told = set(re.findall(r"`([A-Z_]+)`", ERRORS.partition("## Classes")[0]))
    used = {kind.reason for kind in CODES if kind is not Overloaded}
    for source in python("core", "service"):
        used |= set(NAMED.findall(source.text)) | set(GIVEN.findall(source.text))
    assert {"MEMORY", "DEVICE_MEMORY", "GRAMMAR_WORK", "QUEUE_FULL"} <= used
    assert used - told == set()
