"""What product code must not do: run code from data, or measure time with a clock that jumps."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from tests.tidy.source import Source

BANNED_MODULES = {"pickle", "_pickle", "cPickle", "marshal", "dill", "cloudpickle", "shelve"}
BANNED_CALLS = {
    "torch.load": "reads pickles; weights come from safetensors only",
    "yaml.load": "builds objects from data; use yaml.safe_load",
    "yaml.load_all": "builds objects from data; use yaml.safe_load_all",
    "yaml.full_load": "builds objects from data; use yaml.safe_load",
    "yaml.unsafe_load": "builds objects from data; use yaml.safe_load",
    "time.time": "jumps; use time.monotonic, or datetime for a date that people read",
    "eval": "runs code from data",
    "exec": "runs code from data",
    "builtins.eval": "runs code from data",
    "builtins.exec": "runs code from data",
}


def banned(sources: Iterable[Source]) -> list[str]:
    """Imports, calls, bare references and keyword arguments from the lists above."""
    findings: list[str] = []
    for source in sources:
        names = _aliases(source.tree)
        for node in ast.walk(source.tree):
            for message in _faults(node, names):
                findings.append(source.at(node, message))
    return findings


def _faults(node: ast.AST, names: dict[str, str]) -> list[str]:
    if isinstance(node, ast.Import):
        return [f"{alias.name} is banned" for alias in node.names if alias.name.split(".")[0] in BANNED_MODULES]
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module} is banned"] if (node.module or "").split(".")[0] in BANNED_MODULES else []
    if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
        full = _full_name(node, names)
        return [f"{full}: {BANNED_CALLS[full]}"] if full in BANNED_CALLS else []
    if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
        off = isinstance(node.value, ast.Constant) and node.value.value is False
        return [] if off else ["trust_remote_code may only be given as a literal False"]
    return []


def _aliases(tree: ast.Module) -> dict[str, str]:
    """Local name -> what it was imported as."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update({alias.asname: alias.name for alias in node.names if alias.asname})
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    return names


def _full_name(node: ast.expr, names: dict[str, str]) -> str:
    """`t.load` -> `torch.load` after `import torch as t`; empty for anything but plain dotted names."""
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        base = _full_name(node.value, names)
        return f"{base}.{node.attr}" if base else ""
    return ""
