"""Where production keeps what the oracles count: they read structures, not the methods that keep them."""

from __future__ import annotations

from typing import Any

from core.prefix.base import PrefixCache


def tree(cache: PrefixCache) -> Any:
    """The radix tree inside either cache."""
    return getattr(cache, "_groups", cache)
