"""Public names say what they are and what they return.

A method that overrides one of a base class is described there: in this repository the base must have the words, and a
base from elsewhere is taken to have them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from tests.tidy.source import Source

Function = ast.FunctionDef | ast.AsyncFunctionDef
Classes = dict[str, list[ast.ClassDef]]

# Bases that bring no methods of their own to override.
PLAIN_BASES = {
    "object",
    "Protocol",
    "ABC",
    "Generic",
    "Enum",
    "IntEnum",
    "StrEnum",
    "NamedTuple",
    "Exception",
    "TypedDict",
}


def is_public(name: str) -> bool:
    """Dunder methods are described by the language."""
    return not name.startswith("_")


def missing_docs(sources: Iterable[Source]) -> list[str]:
    """Public modules, classes and functions without a docstring."""
    sources = list(sources)
    classes = _classes(sources)
    findings = []
    for source in sources:
        if source.text.strip() and ast.get_docstring(source.tree) is None:
            findings.append(source.at(1, "the module has no docstring"))
        for node, owner in _public(source.tree):
            if ast.get_docstring(node) is None and not _described_elsewhere(node, owner, classes):
                findings.append(source.at(node, f"{node.name} has no docstring"))
    return findings


def missing_returns(sources: Iterable[Source]) -> list[str]:
    """Public functions that do not say what they return."""
    return [
        source.at(node, f"{node.name} has no return annotation")
        for source in sources
        for node, _ in _public(source.tree)
        if isinstance(node, Function) and node.returns is None
    ]


def _public(tree: ast.Module) -> Iterator[tuple[Function | ast.ClassDef, ast.ClassDef | None]]:
    """Public classes and functions with the class they belong to; what is nested in functions is nobody else's."""
    for node in tree.body:
        if isinstance(node, Function | ast.ClassDef) and is_public(node.name):
            yield node, None
            if isinstance(node, ast.ClassDef):
                members = (each for each in node.body if isinstance(each, Function) and is_public(each.name))
                yield from ((member, node) for member in members)


def _described_elsewhere(node: Function | ast.ClassDef, owner: ast.ClassDef | None, classes: Classes) -> bool:
    if isinstance(node, ast.ClassDef):
        return False
    # A member of a protocol with `...` for a body may be described by the class as a whole.
    stub = all(isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant) for each in node.body)
    variant = any(
        isinstance(each, ast.Attribute) and each.attr in ("setter", "deleter") for each in node.decorator_list
    )
    return stub or variant or (owner is not None and _overrides(node.name, owner, classes, set()))


def _overrides(method: str, owner: ast.ClassDef, classes: Classes, seen: set[str]) -> bool:
    for base in map(_base_name, owner.bases):
        if base in PLAIN_BASES or base in seen:
            continue
        seen.add(base)
        if base not in classes:
            return True
        for each in classes[base]:
            named = [m for m in each.body if isinstance(m, Function) and m.name == method and ast.get_docstring(m)]
            if named or _overrides(method, each, classes, seen):
                return True
    return False


def _base_name(node: ast.expr) -> str:
    node = node.value if isinstance(node, ast.Subscript) else node
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _classes(sources: Iterable[Source]) -> Classes:
    found: Classes = {}
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(node)
    return found
