"""The interface through which another component learns what a prefix cache holds. A cache works without an observer."""

from __future__ import annotations

from typing import Protocol

from core.types.arrays import Ints
from core.types.prefixes import PrefixStored


class PrefixObserver(Protocol):
    """Called right after every change, on the cache's thread. Must not call the cache, and must return fast."""

    def stored(self, salt: str, change: PrefixStored) -> None:
        """The cache took over the pages of `change` in the namespace `salt`."""
        ...

    def removed(self, pages: Ints) -> None:
        """The cache gave up `pages`, int64[n], of any namespace."""
        ...
