"""Tests that share the machine say nothing of how long something took: beside others that is luck."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from tests.tidy.source import Source

CLOCKS = frozenset({"monotonic", "perf_counter", "time", "monotonic_ns", "perf_counter_ns", "time_ns"})
"""Of `time` and of event loops; clocks of the processor are left out, because a stalled host does not move them."""


def elapsed_bounds(sources: Iterable[Source]) -> list[str]:
    """Assertions that the wall clock moved by less than something, in what has not the mark `alone`.

    A patience (`assert time.monotonic() < end`) is none: it ends a test that would hang. The mark stands at a function
    or in `pytestmark`.
    """
    findings: list[str] = []
    for source in sources:
        if _whole_file_alone(source.tree):
            continue
        for function in _functions(source.tree):
            if any(map(_is_mark, function.decorator_list)):
                continue
            spans = _spans(function)
            findings += [
                source.at(node, "bounds elapsed time; count work, use a clock of the processor, or mark it alone")
                for node in ast.walk(function)
                if _asserts(node, spans)
            ]
    return findings


def _is_mark(node: ast.expr) -> bool:
    return ast.unparse(node) == "pytest.mark.alone"


def _whole_file_alone(tree: ast.Module) -> bool:
    marks = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["pytestmark"]
    )
    return any(_is_mark(each) for value in marks for each in ([value, *ast.iter_child_nodes(value)]))


def _asserts(node: ast.AST, spans: set[str]) -> bool:
    """Whether it asserts such a bound itself, or by `scorecard`, which asserts what it records."""
    if isinstance(node, ast.Assert):
        return any(_bounds(each, spans) for each in ast.walk(node.test))
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "scorecard"):
        return False
    measured = [each.id for value in node.args for each in ast.walk(value) if isinstance(each, ast.Name)]
    return any(keyword.arg == "at_most" for keyword in node.keywords) and not spans.isdisjoint(measured)


def _functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def _spans(function: ast.AST) -> set[str]:
    """Names that hold a difference of clocks."""
    return {
        target.id
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and _is_span(node.value, set())
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _is_span(node: ast.expr, spans: set[str]) -> bool:
    if isinstance(node, ast.Name):
        return node.id in spans
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub) and _reads_clock(node)


def _reads_clock(node: ast.expr) -> bool:
    calls = (each.func for each in ast.walk(node) if isinstance(each, ast.Call) and not each.args)
    return any(isinstance(call, ast.Attribute) and call.attr in CLOCKS for call in calls)


def _bounds(node: ast.AST, spans: set[str]) -> bool:
    if not isinstance(node, ast.Compare):
        return False
    sides = [node.left, *node.comparators]
    below = zip(sides, node.ops, sides[1:])
    return any(
        _is_span(left if isinstance(operator, ast.Lt | ast.LtE) else right, spans)
        for left, operator, right in below
        if isinstance(operator, ast.Lt | ast.LtE | ast.Gt | ast.GtE)
    )
