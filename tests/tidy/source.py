"""The repository's own files as the rules see them, and the form of what they find."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from tests.support.repository import ROOT

GENERATED = "service/pb/slipstream/"
"""What protoc writes; no rule but "it is current" applies to it."""

TEXT_SUFFIXES = {".py", ".pyi", ".md", ".toml", ".yaml", ".yml", ".proto", ".sh", ".js", ".tpl", ".cfg", ".json"}
SKIPPED_FOLDERS = {"node_modules", "__pycache__", "build", "dist", "checkpoint"}


@dataclass(frozen=True)
class Source:
    """One file. `path` is relative to the repository and uses slashes."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """Its syntax; for Python files only."""
        return ast.parse(self.text, self.path)

    @property
    def module(self) -> str:
        """The dotted name under which it is imported."""
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    def at(self, where: ast.AST | int, message: str) -> str:
        """A finding: `path:line: message`, which editors and terminals can follow."""
        line = where if isinstance(where, int) else getattr(where, "lineno", 1)
        return f"{self.path}:{line}: {message}"


def files(*folders: str) -> Iterator[Path]:
    """Every file in these top-level folders that a person wrote."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*")):
            inside = path.relative_to(ROOT).parts
            if path.is_file() and not SKIPPED_FOLDERS.intersection(inside):
                yield path


def python(*folders: str) -> list[Source]:
    """Parsed Python files without generated ones."""
    found = (_source(path) for path in files(*folders) if path.suffix == ".py")
    return [source for source in found if not source.path.startswith(GENERATED)]


@cache
def _source(path: Path) -> Source:
    """Once for all rules of a run, for parsing it takes longer than most rules."""
    return Source(str(path.relative_to(ROOT)), path.read_text())


def texts() -> list[Source]:
    """Everything that is read as text: code, documents, charts, and the files at the top."""
    folders = ("core", "service", "tests", "protos", "helm", "docs")
    inside = [path for path in files(*folders) if path.suffix in TEXT_SUFFIXES]
    top = [path for path in sorted(ROOT.iterdir()) if path.is_file() and path.name != "LICENSE"]
    written = [
        path for path in [*inside, *top, ROOT / ".ci" / "run"] if path.suffix in TEXT_SUFFIXES or not path.suffix
    ]
    found = (Source(str(path.relative_to(ROOT)), path.read_text()) for path in written if path.exists())
    return [source for source in found if not source.path.startswith(GENERATED)]


def report(findings: list[str]) -> None:
    """Fail the calling test with every finding at once."""
    assert not findings, "\n" + "\n".join(findings)
