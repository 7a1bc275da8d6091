"""What was compiled is found again by all that it depends on, and by nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from core.models.native.extension import DECODER
from core.native.host import HOST
from core.native.library import Library, library_at

LIBRARIES = [DECODER, HOST]


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
def test_every_file_of_the_source_is_compiled(library: Library) -> None:
    """A header that the key forgot would be changed in vain: the cache would go on with what was compiled before."""
    folder = library.sources[0].parent
    assert set(library.sources) == {path for path in folder.iterdir() if path.suffix in (".cpp", ".h")}


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
def test_the_process_that_compiles_finds_it_again(library: Library) -> None:
    assert library_at(library.at) is library


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
def test_every_byte_of_the_source_is_in_the_key(library: Library, tmp_path: Path) -> None:
    copies = tuple(tmp_path / source.name for source in library.sources)
    for copy, source in zip(copies, library.sources, strict=True):
        copy.write_bytes(source.read_bytes())
    copied, before = replace(library, sources=copies), library.path()
    assert copied.path() == before, "the same code, wherever it lies"
    for copy in copies:
        code = copy.read_bytes()
        copy.write_bytes(code.replace(b"0", b"1", 1) if b"0" in code else code.replace(b"1", b"2", 1))
        assert copied.path() != before, copy.name
        copy.write_bytes(code)
    assert replace(library, flags=(*library.flags, "-g")).path() != before
