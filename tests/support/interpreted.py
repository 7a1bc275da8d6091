"""Triton's interpreter, with calls between kernels' functions at a fourth of their time."""

from __future__ import annotations

from typing import Any

import pytest


def quick_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let functions of a kernel be called without patching Triton's language anew.

    The interpreter replaces all of that when a kernel is launched, and again in each call of one function by another,
    which takes milliseconds and changes nothing but for the first call of a module.
    """
    from triton.runtime import interpreter

    known: set[str] = set()

    def call(function: Any, *arguments: Any, **named: Any) -> Any:
        if function.fn.__module__ not in known:
            interpreter._patch_lang(function.fn)
            known.add(function.fn.__module__)
        return function.rewrite()(*arguments, **named)

    monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", call)
