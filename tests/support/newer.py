"""Which tests need newer packages than the lowest that pyproject.toml allows: `newer.txt` says it, a line for each.

With the packages that `make venv` installs they run; `make test-lowest` skips them, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from typing import NamedTuple

from packaging.version import Version

from tests.support.repository import ROOT

FILE = ROOT / "tests" / "newer.txt"


class Need(NamedTuple):
    """A package, and its version from which on a test passes."""

    package: str
    version: str


def listed(text: str) -> dict[str, Need]:
    """By node id, or that of all cases of a function, the needs of such a file: a line each, but for comments."""
    lines = (line.split(maxsplit=2) for line in text.splitlines() if line and not line.startswith("#"))
    return {test: Need(package, version) for package, version, test in lines}


NEWER = listed(FILE.read_text())


def too_old(test: str, installed: Callable[[str], str] = metadata.version) -> str | None:
    """Why this test is skipped here; None if it is not."""
    need = NEWER.get(test) or NEWER.get(test.partition("[")[0])
    if need is None:
        return None
    try:
        found = installed(need.package)
    except metadata.PackageNotFoundError:
        # The test says so itself.
        return None
    return None if Version(found) >= Version(need.version) else f"needs {need.package} {need.version}"
