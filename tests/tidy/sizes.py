"""How long files and functions may be, and what they may not be called."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from tests.tidy.source import Source

MAX_FILE_LINES = 350
MAX_FUNCTION_LINES = 60
GRAB_BAGS = {"utils.py", "util.py", "common.py", "misc.py", "helpers.py"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(source: Source) -> Iterator[tuple[Function, int]]:
    """Every function with its length, from `def` to its last line, docstring and all."""
    for node in ast.walk(source.tree):
        if isinstance(node, Function):
            yield node, (node.end_lineno or node.lineno) - node.lineno + 1


def long_files(sources: Iterable[Source]) -> list[str]:
    """Files with more than one noun in them, going by their length."""
    lengths = [(source, source.text.count("\n") + 1) for source in sources]
    return [
        source.at(1, f"{lines} lines, at most {MAX_FILE_LINES}")
        for source, lines in lengths
        if lines > MAX_FILE_LINES + 1
    ]


def long_functions(sources: Iterable[Source]) -> list[str]:
    """Functions that do not fit a screen."""
    return [
        source.at(node, f"{node.name} has {lines} lines, at most {MAX_FUNCTION_LINES}")
        for source in sources
        for node, lines in functions(source)
        if lines > MAX_FUNCTION_LINES
    ]


def grab_bags(sources: Iterable[Source]) -> list[str]:
    """Files named after nothing in particular."""
    found = [source for source in sources if source.path.rsplit("/", 1)[-1] in GRAB_BAGS]
    return [source.at(1, "name the noun that this file is about") for source in found]


def mixins(sources: Iterable[Source]) -> list[str]:
    """Classes that are meant to share `self` with strangers."""
    return [
        source.at(node, f"{node.name}: compose instead of mixing in")
        for source in sources
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ClassDef) and node.name.endswith("Mixin")
    ]
