"""Which prefixes have copies in host memory: a second prefix cache, of larger pages. Host state only.

Its pages are chunks of some hundred tokens, so that a copy is few transfers of many bytes (LMCache's form). A chunk is
there or not, whatever the first cache holds of it: it is written through when its request gives back its row, so that
nothing waits for a copy when pages are evicted (HiCache's write-through).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from core.invariants import check
from core.memory.host_moves import HostCopy
from core.memory.host_tier import HostTier
from core.prefix.base import Ids
from core.prefix.node import PrefixNode
from core.prefix.radix import RadixCache
from core.prefix.tenants import TenantOf, tenant_of


@dataclass(frozen=True, slots=True)
class HostMemory:
    """`prefixes`: which prefixes are in `tier`; None where the device keeps none either."""

    tier: HostTier
    prefixes: HostPrefixes | None
    rejoins: bool
    """Whether retracted requests leave copies there. Not where drafts are verified: a row is then ahead of its text."""
    leaves: bool = False
    """Whether those do whose rows hold more than keys, of all up to the end of a page."""


@dataclass(frozen=True, slots=True, eq=False)
class HeldPrefix:
    """Copies of the first `tokens` tokens of a prompt; good until the next call that takes room, unless locked."""

    tokens: int
    copies: tuple[HostCopy, ...]
    node: PrefixNode


class HostPrefixes:
    """Chunks of prefixes, by their token ids and all before them, for each namespace apart.

    Copies that were not used for longest give way, of tenants that hold too much before others; see `RadixCache`. A
    copy may be found before it has landed: it is read behind the event of its landing.
    """

    def __init__(self, tier: HostTier, chunk: int, of: TenantOf = tenant_of) -> None:
        """`chunk`: tokens of a copy. `of`: tells the tenant of a namespace. `tier` is spared what this holds."""
        self.chunk = chunk
        self._tier = tier
        self._index = RadixCache(chunk, of)
        self._copies: dict[int, HostCopy] = {}
        """By page of the index, which is the first block of the copy."""
        self._blocks_each = tier.blocks_for(chunk)
        self.evicted = 0
        """Tokens that gave way to others so far."""
        tier.spare = self._spare

    @property
    def tokens(self) -> int:
        """Tokens that there are copies of."""
        return self._index.cached_pages * self.chunk

    def peek(self, ids: Ids, limit: int, salt: str) -> int:
        """How many of the first `limit` tokens of `ids`, int64[n], `find` would find. Changes nothing."""
        return self._index.peek(ids, limit, salt)

    def find(self, ids: Ids, limit: int, salt: str) -> HeldPrefix:
        """The copies of the longest prefix of `ids`, int64[n], of at most `limit` tokens; they count as just used."""
        match = self._index.match(ids, limit, salt)
        copies = tuple(self._copies[page] for page in match.pages.tolist())
        return HeldPrefix(len(copies) * self.chunk, copies, match.node)

    def lock(self, held: HeldPrefix) -> None:
        """Keep these copies until as many calls of `unlock`: a row waits for them."""
        self._index.lock(held.node)

    def unlock(self, held: HeldPrefix) -> None:
        """Undo one `lock`."""
        self._index.unlock(held.node)

    def extend(self, ids: Ids, salt: str) -> tuple[int, tuple[HostCopy, ...]]:
        """Make room for the whole chunks of `ids`, int64[n], that are not held yet, as far as there is any.

        Returns (tokens before the first new copy, new copies), which are found from now on: the caller begins to fill
        them before anything else is asked.
        """
        held = self.find(ids, len(ids), salt)
        wanted, taken = len(ids) // self.chunk - len(held.copies), list[HostCopy]()
        # Its own beginning must not give way to its end.
        self.lock(held)
        while len(taken) < wanted and (copy := self._tier.take(self.chunk)) is not None:
            taken.append(copy)
        self.unlock(held)
        if taken:
            copies = [*held.copies, *taken]
            self._copies.update((_page(copy), copy) for copy in taken)
            pages = np.array([_page(copy) for copy in copies], np.int64)
            self._index.insert(ids[: len(copies) * self.chunk], pages, salt, held.tokens)
        return held.tokens, tuple(taken)

    def flush(self, tenant: str | None = None) -> int:
        """Give up every copy that is not locked, of `tenant` only if given; returns their tokens."""
        return self._drop(self._index.clear(tenant))

    def check_integrity(self) -> None:
        """Recompute what the index holds; raises InvariantViolation naming what is off."""
        self._index.check_integrity()
        held, cached = len(self._copies), self._index.cached_pages
        check("page_conservation", held == cached, held=held, cached=cached)

    def _spare(self, blocks: int) -> None:
        count = -(-blocks // self._blocks_each)
        # Too few would be given up for nothing.
        if count <= self._index.evictable_pages:
            self.evicted += self._drop(self._index.evict(count))

    def _drop(self, pages: Ids) -> int:
        for page in pages.tolist():
            self._tier.free(self._copies.pop(page))
        return len(pages) * self.chunk


def _page(copy: HostCopy) -> int:
    return int(copy.blocks[0])
