"""Stands in for plugins of pytest that are missing here: takes their options and marks, and runs coroutines.

Where all of them are at hand it does nothing.
"""

from __future__ import annotations

import asyncio
import inspect

import pytest

from tests.support.at_hand import SERVERS, missing

INI = {"pytest_asyncio": ("asyncio_mode", "asyncio_default_fixture_loop_scope"), "pytest_timeout": ("timeout",)}
"""Options of pyproject.toml, by the package that declares them. One that is not declared is an error."""
OPTIONS = {"hypothesis": "--hypothesis-seed", "pytest_timeout": "--timeout"}
"""Options of command lines, likewise."""
MARKS = {"pytest_asyncio": "asyncio", "pytest_timeout": "timeout"}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options of missing packages."""
    for package in missing(*INI):
        for name in INI[package]:
            parser.addini(name, f"taken for {package}, which is missing")
    for package in missing(*OPTIONS):
        parser.addoption(OPTIONS[package], default=None, help=f"taken for {package}, which is missing")


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marks of missing packages, and run coroutines where no plugin does."""
    for package in missing(*MARKS):
        config.addinivalue_line("markers", f"{MARKS[package]}: taken for {package}, which is missing")
    if missing("pytest_asyncio"):
        config.pluginmanager.register(CoroutineRunner())


def pytest_report_header() -> str | None:
    """The line that says what this run cannot do."""
    absent = missing(*SERVERS, *INI, "hypothesis")
    return f"not at hand: {', '.join(absent)}; tests that need them cannot run" if absent else None


class CoroutineRunner:
    """Runs tests that are coroutines, each in a loop of its own. Their fixtures have to be plain functions."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool | None:
        """Run one; any other test is left to pytest."""
        if not inspect.iscoroutinefunction(pyfuncitem.obj):
            return None
        given = inspect.signature(pyfuncitem.obj).parameters
        asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in given}))
        return True
