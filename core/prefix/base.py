"""The contract of a prefix cache: which KV pages already hold the beginning of a new prompt, and which may be freed.

Every page has one owner: the allocator's free list, a request, or the cache. `insert` moves pages from a request to the
cache; `evict`, `clear` and `unlock` hand pages back, and the caller returns those to the allocator. A page held by the
cache may be *read* by any number of requests, each of which keeps a lock on the prefix it reads.

The cache is host state of the scheduler: all calls come from one thread, and none touches the device. It may therefore
be told of pages that the device has not written yet. A request that matches such a page is planned later than the one
that writes it, and the forward thread executes plans in their order (law 4: one FIFO makes reuse safe). So the write
always precedes the read. The same law makes it safe to hand out a freed page at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from core.prefix.node import PrefixNode
from core.prefix.observer import PrefixObserver
from core.types.prefixes import PrefixStored

Ids = npt.NDArray[np.int64]
Pages = npt.NDArray[np.int64]

NO_PAGES: Pages = np.empty(0, np.int64)
NO_PAGES.flags.writeable = False

GROUP_MARK = "\x00group\x00"
"""First characters of a namespace that only the samples of one request share."""


def group_salt(group_id: str) -> str:
    """The namespace of one request's samples. `group_id` must be made by the engine, never taken from a client."""
    return GROUP_MARK + group_id


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """What the cache holds of a prompt. `node` is good until the next `evict`, `clear` or `unlock` unless it is locked.

    `pages[i]` holds tokens [i * page_size, (i + 1) * page_size) of the prompt; it is the cache's page, to be read only.
    """

    pages: Pages
    node: PrefixNode


@dataclass(frozen=True, slots=True)
class InsertResult:
    """What became of the offered pages; `owned_from` below is the argument of `insert`.

    If `node` is None, all pages stay the caller's. Else the caller still owns `duplicate_pages`, and the other pages
    from `owned_from` on belong to the cache now. The caller may go on reading its duplicates, and frees them when it
    stops; other requests read the cache's copies. A page is a duplicate by its number, so offering the same pages twice
    changes nothing and reports the same duplicates.
    """

    node: PrefixNode | None
    """End of the inserted prefix; lock it before unlocking an older node of the request. None if nothing is kept."""
    adopted: int
    """Pages that the cache took over."""
    duplicate_pages: Pages
    """Offered pages whose tokens the cache holds already, under other page numbers."""
    original_pages: Pages
    """The cache's page numbers: `original_pages[i]` holds the same tokens as `duplicate_pages[i]`."""


class PrefixCache(ABC):
    """Whole pages of token ids -> page numbers, separately for each salt."""

    page_size: int
    """Tokens per page; nothing smaller is ever matched or kept."""

    @abstractmethod
    def namespace(self, salt: str, group_id: str | None) -> str:
        """The `salt` argument for a request's calls below. Mutates nothing.

        `salt` comes from the client and separates tenants. `group_id` is set for requests with several samples: these
        share their prompt even in a cache that keeps nothing between requests.
        """

    @abstractmethod
    def match(self, ids: Ids, limit: int, salt: str) -> PrefixMatch:
        """The longest cached prefix of `ids` in whole pages, of at most `limit` tokens; it may be empty.

        Marks the prefix as just used, and may split a node at its end. Locks nothing: no `evict` may come between this
        and `lock`. Pass `limit=len(ids) - 1` when at least one token has to be computed for its logits.
        """

    @abstractmethod
    def peek(self, ids: Ids, limit: int, salt: str) -> int:
        """How many tokens `match` would find. Mutates nothing, not even recency: for ordering a queue."""

    @abstractmethod
    def lock(self, node: PrefixNode) -> None:
        """Keep the prefix that ends at `node`, and every prefix of it, from eviction. Each lock needs one unlock."""

    @abstractmethod
    def unlock(self, node: PrefixNode) -> Pages:
        """Undo one `lock` of this node, and mark it as just used. Raises InvariantViolation if it has no lock.

        Returns the pages that the cache drops because of it, for the caller to free; empty for a cache that retains.
        """

    def takes(self, salt: str) -> bool:
        """Whether anything that is offered under `salt` is kept; where nothing is, nothing need be offered."""
        return True

    @abstractmethod
    def insert(self, ids: Ids, pages: Pages, salt: str, owned_from: int) -> InsertResult:
        """Offer `pages`, which hold or will hold the first `len(pages) * page_size` tokens of `ids`.

        Offer only what submitted steps write, or the step now being planned: a page that nothing writes would be read.
        The first `owned_from` tokens, a multiple of the page size, lie in the cache already, from a match or an earlier
        insert that is still locked. Pages whose tokens the cache lacks become its own; the others stay the caller's, as
        duplicates. The inserted prefix is marked as just used and is not locked. Locked prefixes never change. Raises
        InvariantViolation if `owned_from` or the number of pages cannot be right, or a page would get a second owner.
        """

    @abstractmethod
    def evict(self, num_pages: int) -> Pages:
        """Give up `num_pages` unlocked pages, or all there are if that is fewer; evicting 0 does nothing.

        Of each tenant the least recently used prefixes go first, from their tails. `core.prefix.tenants` decides which
        tenant gives up. Returns the pages for the caller to free. Nodes from unlocked matches and inserts must not be
        used afterwards.
        """

    @abstractmethod
    def clear(self, tenant: str | None = None) -> Pages:
        """Evict everything that is not locked, of `tenant` only if given. Returns the pages for the caller to free."""

    @abstractmethod
    def behind(self, ids: Ids, kept: int, salt: str) -> PrefixNode | None:
        """The node whose first page follows the first `kept` tokens of `ids`; None when the cache holds no such page.

        `kept` must be a multiple of the page size. May split a node. The returned node is good until the next `evict`,
        `clear` or `unlock`.
        """

    @abstractmethod
    def condemn(self, node: PrefixNode) -> Pages:
        """Give up `node` and everything below it, so that no match finds it again.

        Returns the pages for the caller to free; empty where the last `unlock` has dropped them already. Raises
        InvariantViolation if a node is locked.
        """

    def observe(self, observer: PrefixObserver | None) -> bool:
        """Tell `observer` of every change from now on; None ends that. Returns whether this cache reports changes."""
        return False

    def contents(self, salt: str) -> list[PrefixStored]:
        """Everything cached under `salt`, parents before children. O(nodes); copies no ids."""
        return []

    @property
    @abstractmethod
    def cached_pages(self) -> int:
        """All pages that the cache owns, locked or not."""

    @property
    @abstractmethod
    def locked_pages(self) -> int:
        """Pages that cannot be evicted now."""

    @abstractmethod
    def held_only_by(self, nodes: Sequence[PrefixNode]) -> int:
        """How many locked pages would become evictable if one lock on each of `nodes` were undone.

        A node that is named twice loses two locks. Mutates nothing, not even recency.
        """

    @property
    def evictable_pages(self) -> int:
        """Number of pages that `clear` would return; admission counts them as available."""
        return self.cached_pages - self.locked_pages

    @abstractmethod
    def check_integrity(self) -> None:
        """Recompute every counter, lock and page owner from the structure itself.

        Raises `InvariantViolation` if one is off. Costs a walk over everything: for tests and for idle moments.
        """
