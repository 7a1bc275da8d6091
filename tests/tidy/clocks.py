"""Tests that share the machine say nothing of how long something took: beside others that is luck."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from tests.support.alone import ALONE
from tests.tidy.source import Source

CLOCKS = frozenset({"monotonic", "perf_counter", "time", "monotonic_ns", "perf_counter_ns", "time_ns"})
"""Of `time` and of event loops; clocks of the processor are left out, because a stalled host does not move them."""


def elapsed_bounds(sources: Iterable[Source]) -> list[str]:
    """Assertions, outside the half of the suite that runs alone, that the wall clock moved by less than something.

    A patience (`assert time.monotonic() < end`) is none: it ends a test that would hang.
    """
    findings: list[str] = []
    for source in sources:
        if ALONE.search("/" + source.path) or "mark.alone" in source.text:
            continue
        for function in _functions(source.tree):
            spans = _spans(function)
            findings += [
                source.at(node, "bounds elapsed time; count work, or use a clock of the processor")
                for node in ast.walk(function)
                if isinstance(node, ast.Assert) and any(_bounds(each, spans) for each in ast.walk(node.test))
            ]
    return findings


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
