"""Every check that can fail in production is explained, and nothing else is."""

from __future__ import annotations

import ast
from importlib.util import find_spec

import pytest

from core.invariants import HOST_CHECKS
from tests.support.repository import ROOT
from tests.tidy.invariant_names import differences
from tests.tidy.source import Source, python, report

DOCUMENT = ROOT / "core" / "INVARIANTS.md"


def check_names() -> list[str]:
    """Host checks, and those of the device floor where it is built."""
    names = list(HOST_CHECKS)
    if find_spec("core.device.checks") is not None:
        from core.device.checks import DEVICE_CHECKS

        names += DEVICE_CHECKS
    return names


@pytest.mark.skipif(not DOCUMENT.exists(), reason="core/INVARIANTS.md is not written yet")
def test_the_document_explains_exactly_the_checks() -> None:
    report(differences(check_names(), DOCUMENT.read_text()))


def test_no_name_is_used_twice() -> None:
    names = check_names()
    assert len(set(names)) == len(names)


def test_every_check_call_has_a_name_from_the_list() -> None:
    report([finding for source in python("core") for finding in unknown_names(source)])


def unknown_names(source: Source) -> list[str]:
    """Calls of `check` with a literal name that is not in the closed list."""
    calls = [node for node in ast.walk(source.tree) if isinstance(node, ast.Call) and node.args]
    named = [node for node in calls if isinstance(node.func, ast.Name) and node.func.id == "check"]
    return [
        source.at(node, f"{node.args[0].value!r} is not in HOST_CHECKS")
        for node in named
        if isinstance(node.args[0], ast.Constant) and node.args[0].value not in HOST_CHECKS
    ]


def test_these_rules_can_fail() -> None:
    rows = (
        "# Invariants\n\n| check | what |\n|---|---|\n| `a` | `x` is … |\n\n### `b`\n\n- `c` in a list is not a row\n"
    )
    assert differences(["a", "b"], rows) == []
    assert differences(["a", "b", "c"], rows) == ["c is checked but not explained"]
    assert differences(["a"], rows) == ["b is explained but not checked"]
    assert differences(["a", "b", "b"], rows) == ["b is named twice"]
    assert unknown_names(Source("core/x.py", "check('page_doubble_free', True)"))
    assert not unknown_names(Source("core/x.py", "check('page_double_free', True)"))
