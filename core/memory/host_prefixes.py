"""Which prefixes have copies in host memory: a second prefix cache, of larger pages. Host state only.

Its pages are chunks of some hundred tokens, so that a copy is few transfers of many bytes (LMCache's form). A chunk is
there or not, whatever the first cache holds of it: it is written through when its request gives back its row, so that
nothing waits for a copy when pages are evicted (HiCache's write-through).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from core.invariants import check
from core.memory.host_endings import HostEnding, HostEndings, Place, tail_of
from core.memory.host_moves import HostCopy
from core.memory.host_tier import HostTier
from core.memory.usable_prefix import Usable
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
    ending: HostEnding | None = None
    """Behind the copies, where rows hold more than keys; its tokens are among `tokens`."""
    trails: tuple[HostCopy, ...] = ()
    """Or what rows hold beside the keys of the last chunks, chunk by chunk."""


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
        self._trails: dict[int, HostCopy] = {}
        """By page of the index: what rows hold beside keys, of the last tokens of that chunk."""
        self._blocks_each = tier.blocks_for(chunk)
        self._most_beside = 0
        """Blocks of the largest of `_trails`."""
        self._of = of
        self._endings = HostEndings(tier, chunk)
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

    def find_ending(self, ids: Ids, usable: Usable, salt: str) -> HeldPrefix | None:
        """As `find`, up to the last ending in `ids` but for its last token, where `usable` allows it; None without any.

        Of a model whose rows hold more than keys.
        """
        match = self._index.match(ids, len(ids) - 1, salt)
        pages = match.pages.tolist()
        ending = self._endings.find(ids[:-1], pages, salt, usable)
        if ending is None:
            return None
        self._endings.used(ending)
        end = self._endings.end_of(ending, pages)
        copies = tuple(self._copies[page] for page in pages[: (end - ending.copy.tokens) // self.chunk])
        return HeldPrefix(end, copies, match.node, ending)

    def find_trail(self, ids: Ids, usable: Usable, salt: str, reach: int) -> HeldPrefix | None:
        """As `find_ending`, up to the end of the last chunk that the trails of `reach` chunks lead to, or of all.

        Of a model whose rows hold something beside the keys of their last tokens, and nothing else (`Trailing`).
        """
        match = self._index.match(ids, len(ids) - 1, salt)
        pages, found, run = match.pages.tolist(), 0, 0
        for count, page in enumerate(pages, 1):
            run = run + 1 if page in self._trails else 0
            if run >= min(reach, count) and usable(count * self.chunk) == count * self.chunk:
                found = count
        if not found:
            return None
        copies = tuple(self._copies[page] for page in pages[:found])
        trails = tuple(self._trails[page] for page in pages[max(0, found - reach) : found])
        return HeldPrefix(found * self.chunk, copies, match.node, trails=trails)

    def without_trail(self, ids: Ids, salt: str) -> tuple[int, list[int]]:
        """(how many of the whole chunks of `ids`, int64[n], are held, which of these chunks have no trail)."""
        pages = self._index.match(ids, len(ids), salt).pages.tolist()
        lacking = [number for number, page in enumerate(pages) if page not in self._trails]
        return len(pages), [*lacking, *range(len(pages), len(ids) // self.chunk)]

    def publish_trail(self, ids: Ids, salt: str, copy: HostCopy) -> bool:
        """`copy`, which was reserved, has what rows hold beside the keys of the last whole chunk of `ids`, int64[n].

        Given up, and False, where there is such a copy already, or no such chunk.
        """
        pages = self._index.match(ids, len(ids), salt).pages.tolist()
        if len(pages) < len(ids) // self.chunk or pages[-1] in self._trails:
            self._tier.free(copy)
            return False
        self._trails[pages[-1]] = copy
        self._most_beside = max(self._most_beside, len(copy.blocks))
        return True

    def lock(self, held: HeldPrefix) -> None:
        """Keep these copies until as many calls of `unlock`: a row waits for them."""
        self._index.lock(held.node)
        if held.ending is not None:
            held.ending.users += 1

    def unlock(self, held: HeldPrefix) -> None:
        """Undo one `lock`."""
        self._index.unlock(held.node)
        if held.ending is not None:
            held.ending.users -= 1

    def extend(self, ids: Ids, salt: str) -> tuple[int, tuple[HostCopy, ...]]:
        """Make room for the whole chunks of `ids`, int64[n], that are not held yet, as far as there is any.

        Returns (tokens before the first new copy, new copies), which are found from now on: the caller begins to fill
        them before anything else is asked.
        """
        held = self.find(ids, len(ids), salt)
        taken = self._taken(held, len(ids) // self.chunk - len(held.copies))
        self._add(ids, salt, held, taken)
        return held.tokens, taken

    def _taken(self, held: HeldPrefix, count: int) -> tuple[HostCopy, ...]:
        taken = list[HostCopy]()
        # Its own beginning must not give way to its end.
        self.lock(held)
        while len(taken) < count and (copy := self._tier.take(self.chunk)) is not None:
            taken.append(copy)
        self.unlock(held)
        return tuple(taken)

    def _add(self, ids: Ids, salt: str, held: HeldPrefix, taken: Sequence[HostCopy]) -> None:
        if taken:
            copies = [*held.copies, *taken]
            self._copies.update((_page(copy), copy) for copy in taken)
            pages = np.array([_page(copy) for copy in copies], np.int64)
            self._index.insert(ids[: len(copies) * self.chunk], pages, salt, held.tokens)

    def reserve(self, ids: Ids, salt: str, count: int) -> tuple[HostCopy, ...]:
        """Room for `count` chunks behind those of `ids`, int64[n], that are held, as far as there is any.

        Nothing finds them until `publish`; `release` gives them back, or `put_back` if the device never heard of them.
        """
        return self._taken(self.find(ids, len(ids), salt), count)

    def publish(self, ids: Ids, salt: str, start: int, copies: Sequence[HostCopy]) -> int:
        """`copies`, which were reserved, have the chunks of `ids` from token `start` on; returns how many count.

        Those that came by another way meanwhile are given up, and all where what is before them is gone.
        """
        held = self.find(ids, start + len(copies) * self.chunk, salt)
        known = (held.tokens - start) // self.chunk if held.tokens >= start else len(copies)
        self.release(copies[:known])
        self._add(ids, salt, held, copies[known:])
        return len(copies[known:])

    def release(self, copies: Sequence[HostCopy]) -> None:
        """Give up copies that were reserved."""
        for copy in copies:
            self._tier.free(copy)

    def put_back(self, copies: Sequence[HostCopy]) -> None:
        """Give up copies that were reserved, and that the device was not told of."""
        for copy in copies:
            self._tier.put_back(copy)

    @property
    def room(self) -> int:
        """How many chunks host memory holds at most."""
        return self._tier.num_blocks // self._blocks_each

    def end(self, ids: Ids, salt: str, beside: tuple[int, ...]) -> tuple[int, HostCopy] | None:
        """Make room for an ending behind `ids`, int64[n], n at least 1, with so many slots of each pool.

        Returns (tokens before the copy, the copy), which is found from now on, as `extend` does. None where it is held
        already, where chunks before it are not, or where there is no room.
        """
        held = self.hold_ending(ids, salt)
        if held is None:
            return None
        if held.ending is not None:
            self._endings.used(held.ending)
            return None
        # Its own beginning must not give way to it.
        self.lock(held)
        copy = self._tier.take(len(ids) - held.tokens, beside)
        self.unlock(held)
        if copy is None:
            return None
        self._add_ending(ids, salt, held, copy)
        return held.tokens, copy

    def hold_ending(self, ids: Ids, salt: str) -> HeldPrefix | None:
        """What is here of an ending behind `ids`, int64[n], n at least 1: the chunks before it, and it, if it is.

        None where chunks before it are not.
        """
        begin = (len(ids) - 1) // self.chunk * self.chunk
        held = self.find(ids, begin, salt)
        if held.tokens < begin:
            return None
        return replace(held, ending=self._endings.at(_place(held, salt), tail_of(ids, begin)))

    def _add_ending(self, ids: Ids, salt: str, held: HeldPrefix, copy: HostCopy) -> None:
        node = held.node if held.copies else None
        if node is not None:
            self._index.lock(node)
        self._endings.add(HostEnding(copy, _place(held, salt), tail_of(ids, held.tokens), node))

    def reserve_beside(self, tokens: int, beside: tuple[int, ...]) -> HostCopy | None:
        """Room for `tokens` tokens and so many slots of each pool, which nothing finds; None without.

        For `publish_ending`, or for `publish_trail`, which needs no tokens.
        """
        return self._tier.take(tokens, beside)

    def publish_ending(self, ids: Ids, salt: str, copy: HostCopy) -> int:
        """`copy`, which was reserved, has the ending behind `ids`; returns how many tokens count, as `publish` does."""
        held = self.hold_ending(ids, salt)
        if held is None or held.ending is not None:
            self._tier.free(copy)
            return 0
        self._add_ending(ids, salt, held, copy)
        return copy.tokens

    def flush(self, tenant: str | None = None) -> int:
        """Give up every copy that is not locked, of `tenant` only if given; returns their tokens."""
        dropped = 0
        for ending in self._endings:
            if not ending.users and (tenant is None or self._of(ending.place[0]) == tenant):
                dropped += ending.copy.tokens
                self._drop_ending(ending)
        return dropped + self._drop(self._index.clear(tenant))

    def check_integrity(self) -> None:
        """Recompute what the index holds; raises InvariantViolation naming what is off."""
        self._index.check_integrity()
        held, cached = len(self._copies), self._index.cached_pages
        check("page_conservation", held == cached, held=held, cached=cached)
        check("page_conservation", self._endings.kept == len(self._endings), endings=self._endings.kept)
        check("page_conservation", self._trails.keys() <= self._copies.keys(), trails=len(self._trails))

    def _spare(self, blocks: int) -> None:
        # Chunks from which no ending is reached, then the endings that were not used for longest, with their chunks.
        for ending in (None, *self._endings):
            if ending is not None and not ending.users:
                self.evicted += ending.copy.tokens
                blocks -= self._drop_ending(ending)
            # Too few would be given up for nothing.
            if -(-blocks // self._blocks_each) <= self._index.evictable_pages:
                self._give_up(blocks)
                return

    def _give_up(self, blocks: int) -> None:
        """Let go of chunks that have so many blocks, with what belongs to them, and of no more than that takes."""
        while blocks > 0 and self._index.evictable_pages:
            before = self._tier.used_bytes
            pages = self._index.evict(-(-blocks // (self._blocks_each + self._most_beside)))
            self.evicted += self._drop(pages)
            blocks -= (before - self._tier.used_bytes) // self._tier.block

    def _drop_ending(self, ending: HostEnding) -> int:
        if ending.node is not None:
            self._index.unlock(ending.node)
        return self._endings.drop(ending)

    def _drop(self, pages: Ids) -> int:
        for page in pages.tolist():
            self._tier.free(self._copies.pop(page))
            if trail := self._trails.pop(page, None):
                self._tier.free(trail)
        return len(pages) * self.chunk


def _place(held: HeldPrefix, salt: str) -> Place:
    """Where an ending behind the chunks of `held` is kept."""
    return salt, _page(held.copies[-1]) if held.copies else 0


def _page(copy: HostCopy) -> int:
    return int(copy.blocks[0])
