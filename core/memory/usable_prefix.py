"""How much of a cached prefix a request can skip computing."""

from __future__ import annotations

from collections.abc import Sequence

from core.memory.companion import Companion
from core.prefix.base import PrefixCache, PrefixMatch
from core.types.arrays import Ints


def usable_prefix(
    cache: PrefixCache, companions: Sequence[Companion], ids: Ints, limit: int, salt: str
) -> tuple[PrefixMatch, int]:
    """The longest cached prefix of `ids`, int64[n], that every companion can resume from, at most `limit` tokens.

    Returns it, and how many pages were cached at all.
    """
    match = cache.match(ids, limit, salt)
    known = len(match.pages)
    # A prefix cut for one companion may end where another cannot resume: repeat until all agree.
    while usable := len(match.pages):
        usable = min((c.resumable(match.pages) for c in companions), default=usable)
        if usable == len(match.pages):
            break
        match = cache.match(ids, usable * cache.page_size, salt)
    return match, known
