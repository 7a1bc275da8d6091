"""Files that import each other, directly or through others, for type checkers only or inside functions included."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter

from tests.tidy.source import Source


def of_files(sources: Iterable[Source]) -> list[str]:
    """The first circle that there is; none for files that can be put in an order."""
    by_module = {source.module.removesuffix(".__init__"): source for source in sources}
    needs = {module: set(_needs(source, by_module)) - {module} for module, source in by_module.items()}
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as error:
        return [f"files import each other: {' <- '.join(error.args[1])}"]
    return []


def _needs(source: Source, modules: Iterable[str]) -> Iterator[str]:
    """Modules that `source` names; `from package import module` names the module and not its package."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                for named in (f"{node.module}.{alias.name}", node.module):
                    if named in modules:
                        yield named
                        break
