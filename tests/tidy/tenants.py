"""Ids and salts become their tenant's in one file, which every service goes through: no dialect can forget it."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from tests.tidy.source import Source

SCOPES = ("scoped_id", "tenant_salt")
"""What makes an id or a salt a tenant's."""
HOME = ("service/calls/open_calls.py", "service/tenant_ids.py")
DIALECTS = ("service/servicers/", "service/gateway/")
OPENS = ("generate", "embed", "abort", "attach", "watch")
"""Methods of an engine and its prefixes that take ids or salts."""


def scoped_elsewhere(sources: Iterable[Source]) -> list[str]:
    """Files of the product that name SCOPES, besides HOME."""
    return [
        source.at(node, f"{node.id} is for {HOME[0]}, which every request passes")
        for source in sources
        if source.path not in HOME
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Name) and node.id in SCOPES
    ]


def round_the_calls(sources: Iterable[Source]) -> list[str]:
    """Servicers and dialects that open, end or follow something on the engine itself."""
    return [
        source.at(node, f"{node.func.attr} of the engine: ask OpenCalls, which knows whose request it is")
        for source in sources
        if source.path.startswith(DIALECTS)
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in OPENS
        if ast.unparse(node.func.value).split(".")[-1] in ("engine", "prefixes", "require()")
    ]
