"""The seam through which somebody learns what a prefix cache holds; nobody has to be there."""

from __future__ import annotations

from typing import Protocol

from core.types.arrays import Ints
from core.types.prefixes import PrefixStored


class PrefixObserver(Protocol):
    """Told of every change right after it, on the cache's thread; must neither call the cache nor take long."""

    def stored(self, salt: str, change: PrefixStored) -> None:
        """Pages joined the namespace `salt`."""
        ...

    def removed(self, pages: Ints) -> None:
        """Pages left, of whatever namespace."""
        ...
