"""Which modules a file imports, however it says so."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from tests.tidy.source import Source


@dataclass(frozen=True)
class Import:
    """One imported module, as an absolute dotted name."""

    line: int
    target: str


def imports(source: Source) -> Iterator[Import]:
    """All of them: at the top, inside functions, for type checkers only, relative, and by a literal name."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from (Import(node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from _from(source, node)
        elif isinstance(node, ast.Call) and _is_dynamic(node) and isinstance(node.args[0], ast.Constant):
            yield Import(node.lineno, str(node.args[0].value))


def _from(source: Source, node: ast.ImportFrom) -> Iterator[Import]:
    base = node.module or ""
    if node.level:
        package = source.module.split(".")
        if not source.path.endswith("/__init__.py"):
            package = package[:-1]
        package = package[: len(package) - node.level + 1]
        base = ".".join([*package, *([base] if base else [])])
    # `from core.executor import interface` names a module, `from core.executor.interface import Executor` does not.
    if base.count(".") < 2 and base.split(".")[0] in ("core", "service"):
        yield from (Import(node.lineno, f"{base}.{alias.name}") for alias in node.names)
    else:
        yield Import(node.lineno, base)


def _is_dynamic(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    return name in ("import_module", "__import__") and bool(call.args)


def within(target: str, package: str) -> bool:
    """Whether `target` is `package` or lies in it."""
    return target == package or target.startswith(package + ".")
