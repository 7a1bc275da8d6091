"""How much of a cached prefix a request can skip computing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from core.memory.companion import Companion
from core.prefix.base import PrefixCache, PrefixMatch
from core.types.arrays import Ints

Usable = Callable[[int], int]
"""How many of so many first tokens of a request may come from the cache; fewer of fewer."""


def usable_prefix(
    cache: PrefixCache, companions: Sequence[Companion], ids: Ints, limit: int, salt: str, usable: Usable
) -> tuple[PrefixMatch, int]:
    """The longest cached prefix of `ids`, int64[n], that every companion can resume from, at most `limit` tokens.

    Its length is one that `usable` allows. Returns it, and how many pages were cached at all.
    """
    match = cache.match(ids, usable(limit), salt)
    known = len(match.pages)
    # A prefix cut for one companion may end where another cannot resume: repeat until all agree.
    while count := len(match.pages):
        fits = min((c.resumable(match.pages) for c in companions), default=count)
        fits = usable(fits * cache.page_size) // cache.page_size
        if fits == count:
            break
        match = cache.match(ids, fits * cache.page_size, salt)
    return match, known
