"""READMEs stay short: the first page a reader sees, and a screen for each room."""

from __future__ import annotations

import re

from tests.support.repository import ROOT
from tests.tidy.floors import FLOORS
from tests.tidy.source import files

MOST_LINES = 120
MOST_LINES_OF_A_ROOM = 60


def test_the_first_page_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= MOST_LINES


def test_rooms_have_a_screen() -> None:
    # The list of decisions grows with them.
    rooms = [
        path
        for path in files("core", "service", "helm", "tests")
        if path.name == "README.md" and path.parent.name != "decisions"
    ]
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in rooms}
    assert "service/README.md" in lengths
    assert {path: length for path, length in lengths.items() if length > MOST_LINES_OF_A_ROOM} == {}


def test_the_rooms_of_service_are_those_that_have_a_floor() -> None:
    text = (ROOT / "service" / "README.md").read_text()
    listed = {name: int(floor) for name, floor in re.findall(r"^\| `(\w+)` \| .* \| (\d+) \|$", text, re.MULTILINE)}
    assert listed == {
        name.removeprefix("service."): floor for name, floor in FLOORS.items() if name.startswith("service.")
    }


def test_every_page_is_listed_once() -> None:
    """As the site wants it; this says it without the generator."""
    index = (ROOT / "docs" / "index.md").read_text()
    listed = re.findall(r"\]\(([\w/-]+\.md)\)", index)
    pages = {str(path.relative_to(ROOT / "docs")) for path in files("docs") if path.suffix == ".md"}
    assert sorted(listed) == sorted(pages - {"index.md"})
