"""What is compiled on the machine that serves is installed there, all that it includes as well."""

from __future__ import annotations

import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

from core.models.native.extension import DECODER
from core.models.products.extension import PRODUCTS
from core.native.host import HOST
from core.native.library import Library

ROOT = Path(__file__).resolve().parents[2]
PATTERNS: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"][
    "package-data"
]


LIBRARIES = pytest.mark.parametrize("library", [DECODER, PRODUCTS, HOST], ids=lambda each: each.name)


@LIBRARIES
def test_each_source_of_a_library_comes_with_its_package(library: Library) -> None:
    assert len(library.sources) > 1
    for source in library.sources:
        installed = [
            package
            for package, patterns in PATTERNS.items()
            for pattern in patterns
            if fnmatch(str(source.relative_to(ROOT)), f"{package.replace('.', '/')}/{pattern}")
        ]
        assert installed, f"{source} is in no package's data"


@LIBRARIES
def test_what_a_source_includes_is_a_source_too(library: Library) -> None:
    """Else code that was compiled before a header changed would be taken for what the header says now."""
    known = {source.resolve() for source in library.sources}
    for source in library.sources:
        for name in re.findall(r'^#include "([^"]+)"', source.read_text(), re.MULTILINE):
            assert (source.parent / name).resolve() in known, f"{source.name} includes {name}"
