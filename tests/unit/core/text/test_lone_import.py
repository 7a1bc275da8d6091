"""One module of a package comes without the rest of it, and as usual where that cannot be."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import importlib.metadata, sys
importlib.metadata.version = lambda name: "7"
sys.path.insert(0, {folder!r})
from core.text.lone_import import import_alone
module = import_alone({name!r})
print(module.__name__, module.SAID, [name for name in sorted(sys.modules) if name.startswith("house")])
"""


def said(folder: Path, name: str, **files: str) -> str:
    """What a new process says of `name` in a package `house` of these files."""
    (folder / "house" / "attic").mkdir(parents=True)
    for path, text in files.items():
        (folder / "house" / f"{path.replace('_in_', '/')}.py").write_text(text)
    script = SCRIPT.format(folder=str(folder), name=name)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def files() -> dict[str, str]:
    return {
        "__init__": "raise RuntimeError('not wanted')",
        "attic_in___init__": "raise RuntimeError('not wanted either')",
        "cellar": "WORD = 'deep'",
        "attic_in_roof": "from .. import __version__, cellar\nSAID = cellar.WORD + __version__",
    }


def test_the_packages_around_it_are_not_run(tmp_path: Path, files: dict[str, str]) -> None:
    found = said(tmp_path, "house.attic.roof", **files)
    assert found == "house.attic.roof deep7 ['house', 'house.attic', 'house.attic.roof', 'house.cellar']"


def test_what_needs_its_package_is_imported_as_usual(tmp_path: Path, files: dict[str, str]) -> None:
    files |= {"__init__": "WHOLE = 'whole'", "attic_in___init__": "", "attic_in_roof": "from .. import WHOLE as SAID"}
    assert (
        said(tmp_path, "house.attic.roof", **files)
        == "house.attic.roof whole ['house', 'house.attic', 'house.attic.roof']"
    )


def test_a_chat_process_has_little_of_its_library() -> None:
    """And renders with it: the other tests of chats say that."""
    script = (
        "import sys\nfrom core.text.lone_import import import_alone\n"
        "import_alone('transformers.utils.chat_template_utils').render_jinja_template\n"
        "print(sum(name.startswith('transformers') for name in sys.modules), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    number, torch = done.stdout.split()
    assert int(number) < 10 and torch == "False", done.stderr
