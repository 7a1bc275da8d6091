"""What was compiled is found again by all that it depends on, and by nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.models.native import extension


def test_every_file_of_the_source_is_compiled() -> None:
    """A header that the key forgot would be changed in vain: the cache would go on with what was compiled before."""
    folder = Path(extension.__file__).parent
    assert {path.name for path in extension.SOURCES} == {p.name for p in folder.iterdir() if p.suffix in (".cpp", ".h")}


def test_every_byte_of_the_source_is_in_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = tuple(tmp_path / source.name for source in extension.SOURCES)
    for copy, source in zip(copies, extension.SOURCES, strict=True):
        copy.write_bytes(source.read_bytes())
    before = extension.library_path()
    monkeypatch.setattr(extension, "SOURCES", copies)
    assert extension.library_path() == before, "the same code, wherever it lies"
    for copy in copies:
        code = copy.read_bytes()
        copy.write_bytes(code.replace(b"0", b"1", 1) if b"0" in code else code.replace(b"1", b"2", 1))
        assert extension.library_path() != before, copy.name
        copy.write_bytes(code)
    monkeypatch.setattr(extension, "FLAGS", [*extension.FLAGS, "-g"])
    assert extension.library_path() != before
