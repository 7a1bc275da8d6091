"""Our operators are registered so that every PyTorch that is allowed can call them."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

import pytest
import torch

from tests.support.repository import ROOT

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed (slipstream[cuda])")


def files_of_operators() -> list[str]:
    """Modules of `core` that register some."""
    return [
        str(path.relative_to(ROOT)).removesuffix(".py").replace("/", ".")
        for path in sorted((ROOT / "core").rglob("*.py"))
        if "@torch.library.custom_op(" in path.read_text()
    ]


def test_no_argument_that_an_operator_changes_has_a_default() -> None:
    """PyTorch 2.11 looks for it among those that were passed, of which the dispatcher leaves out defaults."""
    for name in files_of_operators():
        import_module(name)
    schemas = [each for each in torch._C._jit_get_all_schemas() if each.name.startswith("slipstream::")]
    assert len(schemas) >= 14, [each.name for each in schemas]
    changed = [
        (schema.name, argument)
        for schema in schemas
        for argument in schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    assert len(changed) > 20
    assert [(name, each.name) for name, each in changed if each.has_default_value()] == []
