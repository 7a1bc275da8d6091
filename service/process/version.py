"""The version of this installation, from its package metadata."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

DISTRIBUTION = "slipstream"


def installed_version() -> str:
    """Version of the installed distribution; "0+source" when run from a tree that was never installed."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "0+source"
