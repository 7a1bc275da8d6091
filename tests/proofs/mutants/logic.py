"""Which product files can be broken: those with a branch, a comparison, arithmetic or a call inside a function.

Files of imports, fields, protocols and constant tables cannot, and what protoc generates is tested by its own makers.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.support.repository import ROOT

PRODUCT = ("core", "service")
GENERATED = "service/pb/slipstream/"
NATIVE = {".cpp", ".h", ".js"}
"""Languages that `ast` cannot read: such files count as logic."""

_BRANCHES = (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.Match, ast.Try, ast.comprehension, ast.BoolOp)
_EFFECTS = (ast.Compare, ast.BinOp, ast.UnaryOp, ast.AugAssign, ast.Call, ast.Raise, ast.Assert, ast.Yield, ast.Await)


def files_with_logic() -> list[str]:
    """Paths relative to the repository, sorted."""
    found = (path for folder in PRODUCT for path in (ROOT / folder).rglob("*") if path.is_file())
    names = sorted((path.relative_to(ROOT).as_posix(), path) for path in found)
    return [
        name
        for name, path in names
        if not name.startswith(GENERATED)
        and (path.suffix in NATIVE or (path.suffix == ".py" and has_logic(path.read_text())))
    ]


def has_logic(source: str) -> bool:
    """Whether some function of this Python source decides, computes or calls, or the module itself does."""
    return any(isinstance(node, _BRANCHES + _EFFECTS) for node in _executed(ast.parse(source)))


def _executed(module: ast.Module) -> Iterator[ast.AST]:
    """Nodes of function bodies, of bare calls and of branches outside functions. Not annotations, defaults, tables."""
    pending: list[ast.stmt] = list(module.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.ClassDef):
            if not any("Protocol" in ast.unparse(base) for base in node.bases):
                pending += node.body
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _bodies(node)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for each in ast.walk(node):
                if isinstance(each, ast.Lambda):
                    yield from ast.walk(each.body)
        else:
            yield from ast.walk(node)


def _bodies(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[ast.AST]:
    """What runs when `function` is called; annotations inside it do not."""
    if any("abstractmethod" in ast.unparse(each) for each in function.decorator_list):
        return
    pending: list[ast.AST] = list(function.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Raise) and "NotImplementedError" in ast.unparse(node):
            continue
        yield node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            pending += node.body
        elif isinstance(node, ast.AnnAssign):
            pending += [node.value] if node.value else []
        else:
            pending += ast.iter_child_nodes(node)
