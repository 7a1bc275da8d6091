"""Which packages of the tests are at hand: `make gpu VENV=` runs with an interpreter into which nothing is installed.

Where a package is missing, so are the fixtures that need it, and `stand_ins.py` takes the options that pyproject.toml
and command lines name. Where it is there, nothing is different. No other file asks for these packages.
"""

from __future__ import annotations

from importlib.util import find_spec

SERVERS = ("grpc", "grpc_health", "grpc_reflection", "grpc_status", "prometheus_client", "asyncio_throttle")
NEEDS = {"tests.support.scripted": SERVERS, "tests.support.random_examples": ("hypothesis",)}
"""Plugins of the whole suite, and the packages that they import."""


def missing(*packages: str) -> list[str]:
    """Those that cannot be imported here."""
    return [package for package in packages if find_spec(package) is None]


def plugins() -> list[str]:
    """The plugins whose packages are all at hand."""
    return [plugin for plugin, packages in NEEDS.items() if not missing(*packages)]
