"""Pages that a transfer in flight still touches although their owner has given them back (law 4). Host state only.

The one FIFO makes reuse safe for what runs in it. A copy on another stream, or to another machine, does not: its pages
must not be handed out again before it is over. So whatever starts one holds a lease. A page that is freed meanwhile is
diverted: it stays out of the free list, has no owner, and comes back when its last lease ends. vLLM and SGLang keep a
request alive instead until its transfer is over (vLLM #41383 lost such a request, and its pages with it).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from core.invariants import check
from core.prefix.base import NO_PAGES, PrefixCache
from core.prefix.node import PrefixNode
from core.types.arrays import Ints


@dataclass(slots=True, eq=False)
class Lease:
    """`pages`, int64[n], all different, are read or written outside the FIFO until the lease ends."""

    pages: Ints
    node: PrefixNode | None
    """Locked in the prefix cache for as long: the cached ones among `pages` are on its path. None for no lock."""
    deadline: float | None
    """When the lease ends by itself, in seconds of the loop's clock; None for a transfer that always tells its end."""


class Leases:
    """Which pages are leased, by how many, and which of these are free but for that. Loop thread only."""

    def __init__(self, num_pages: int, cache: PrefixCache) -> None:
        self._cache = cache
        self._leases: dict[int, Lease] = {}
        self._next = 1
        self._lent: Ints = np.zeros(num_pages + 1, np.int64)
        """By page: how many leases there are on it."""
        self._coming = np.zeros(num_pages + 1, np.bool_)
        """By page: it was freed, and is diverted. Invariant: it is lent."""
        self._diverted = 0
        """Invariant: how many pages are diverted."""

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, number: int) -> bool:
        return number in self._leases

    @property
    def diverted(self) -> int:
        """Pages that no request and no cache owns, and that are free once their leases end."""
        return self._diverted

    @property
    def coming(self) -> int:
        """Pages that could be handed out once the leases of now have ended, and cannot before."""
        return self._diverted + self._cache.held_only_by(self.nodes) if self._leases else 0

    @property
    def nodes(self) -> list[PrefixNode]:
        """The locked node of each lease that has one."""
        return [lease.node for lease in self._leases.values() if lease.node is not None]

    def hold(self, pages: Ints, node: PrefixNode | None = None, deadline: float | None = None) -> int:
        """Lease `pages`, int64[n], all different and held by an owner now. Returns the number of the lease.

        `node` is locked meanwhile. A cached page that is leased is not evicted: it would count as room, and make none.
        """
        check("lease_conservation", bool((pages > 0).all() and not self._coming[pages].any()), pages=pages)
        if node is not None:
            self._cache.lock(node)
        number, self._next = self._next, self._next + 1
        self._leases[number] = Lease(pages.copy(), node, deadline)
        self._lent[pages] += 1
        return number

    def adopted(self, pages: Ints, node: PrefixNode) -> Ints:
        """The cache has become the owner of `pages`, int64[n], on the path of `node`: lock them for their leases.

        Returns the pages, int64[n], that the cache gives up by this: they have lost their owner.
        """
        left = [NO_PAGES]
        for lease in self._leases.values():
            if lease.node is None or not np.isin(lease.pages, pages).any():
                continue
            # An empty prefix may have been locked before the namespace had a root.
            if lease.node.is_root or lease.node.leads_to(node):
                self._cache.lock(node)
                left.append(self._cache.unlock(lease.node))
                lease.node = node
        return np.concatenate(left)

    def divert(self, pages: Ints) -> Ints:
        """Of `pages`, int64[n], which lose their owner, those that may be handed out at once."""
        if not self._leases:
            return pages
        lent = self._lent[pages] > 0
        if not lent.any():
            return pages
        kept = pages[lent]
        check("lease_conservation", not self._coming[kept].any(), pages=kept)
        self._coming[kept] = True
        self._diverted += len(kept)
        return pages[~lent]

    def end(self, number: int) -> tuple[Ints, Ints]:
        """The transfer of lease `number` is over. Returns the pages, int64[n], that were diverted and are free now.

        And those, int64[m], that the cache gives up by this: they have lost their owner, and others may lease them.
        Raises InvariantViolation for a lease that has ended.
        """
        check("lease_conservation", number in self._leases, number=number)
        lease = self._leases.pop(number)
        self._lent[lease.pages] -= 1
        free = lease.pages[self._coming[lease.pages] & (self._lent[lease.pages] == 0)]
        self._coming[free] = False
        self._diverted -= len(free)
        return free, NO_PAGES if lease.node is None else self._cache.unlock(lease.node)

    def overdue(self, now: float) -> list[int]:
        """Leases whose deadline has come: their transfer will not tell its end. Changes nothing."""
        return [number for number, each in self._leases.items() if each.deadline is not None and each.deadline <= now]

    def next_deadline(self) -> float | None:
        """The first deadline of all, in seconds of the loop's clock; None without any."""
        return min((each.deadline for each in self._leases.values() if each.deadline is not None), default=None)

    def adrift(self, top: PrefixNode) -> Ints:
        """The cache is about to drop `top` and all below it: unlock what leases have locked there, and lock it no more.

        The leases go on. Returns the pages, int64[n], that the cache gives up by this: they have lost their owner.
        """
        left = [NO_PAGES]
        for lease in self._leases.values():
            if lease.node is not None and top.leads_to(lease.node):
                left.append(self._cache.unlock(lease.node))
                lease.node = None
        return np.concatenate(left)

    def let_go(self, tenant: str | None = None) -> Ints:
        """Unlock what leases have locked in the cache, of `tenant` only if given: all of it is about to be given up.

        The leases go on. Returns the pages, int64[n], that the cache gives up by this: they have lost their owner.
        """
        left = [NO_PAGES]
        for lease in self._leases.values():
            if lease.node is not None and (tenant is None or lease.node.counts_for == tenant):
                left.append(self._cache.unlock(lease.node))
                lease.node = None
        return np.concatenate(left)

    def check_integrity(self) -> None:
        """Recompute every count; raises InvariantViolation naming what is off."""
        lent = np.zeros_like(self._lent)
        for lease in self._leases.values():
            lent[lease.pages] += 1
        check("lease_conservation", bool((lent == self._lent).all()), lent=int(lent.sum()))
        check("lease_conservation", not (self._coming & (lent == 0)).any(), coming=int(self._coming.sum()))
        check("lease_conservation", int(self._coming.sum()) == self._diverted, diverted=self._diverted)
