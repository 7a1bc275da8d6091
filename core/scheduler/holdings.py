"""What each tenant holds of rows and KV pages, and which requests give way for it: dominant resource fairness.

A tenant's share is the larger of its part of the rows and its part of the pages, over its weight (Ghodsi et al. 2011).
A request gives way to one of another tenant only if the giving tenant then still holds at least as much as the taking
one. So each move makes the shares more alike, and no move is ever taken back.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

import numpy as np

from core.memory.request_memory import RequestMemory
from core.scheduler.fair_share import FairShare, Tenant
from core.scheduler.policy import Policy, victim
from core.scheduler.running import RunningSet
from core.types.arrays import Ints
from core.types.request import Req


class Holdings:
    """Compares what tenants hold. Changes nothing. Each answer costs one pass over arrays by row."""

    def __init__(self, shares: FairShare, running: RunningSet, memory: RequestMemory, policy: Policy) -> None:
        self._shares = shares
        self._running = running
        self._memory = memory
        self._policy = policy

    def may_take_a_row(self, tenant: Tenant) -> bool:
        """Whether a waiting request of `tenant` may be tried although tenants that hold less have requests waiting.

        Each of those tenants has a claim to one free row, and to all pages once its first request was refused.
        """
        if not self._shares.contended:
            return True
        available = self._memory.rows.available
        shares = self._now()
        mine = shares[tenant.column]
        poorer = [other for other in self._shares if other.waits and shares[other.column] < mine]
        if any(other.refused for other in poorer):
            return False
        # The tenant that holds least is tried without a free row too: running requests may give way to it.
        return available > len(poorer) or not poorer

    def could_gain(self, tenant: Tenant) -> bool:
        """Whether some other tenant holds as much as `tenant` would with one more row, so that it might give one."""
        if not self._shares.contended:
            return False
        shares, more = self._now(), (tenant.rows + 1) / self._memory.rows.size / tenant.weight
        return any(shares[other.column] >= more for other in self._shares if other is not tenant)

    def giving_way(self, newcomer: Req, rows: Ints) -> list[Req]:
        """Owners of `rows`, int64[n], that may give way to `newcomer`, in the order in which they would.

        The next is always the last in line of the tenant that holds most once those chosen before are gone.
        """
        gainer = self._shares.tenant(newcomer)
        lines = self._lines(newcomer, rows)
        held, taken, found = self._parts(self._running.order)
        need = self._memory.allocator.pages_for(len(newcomer.known_ids()))
        column = gainer.column
        gained = self._share(gainer, held[column] + 1, taken[column] + found[column] + need)
        richest = [(-self._share(t, held[t.column], taken[t.column] + found[t.column]), -t.number, t) for t in lines]
        heapq.heapify(richest)
        chosen: list[Req] = []
        while richest:
            _, number, tenant = heapq.heappop(richest)
            loser, pages, longest = lines[tenant].pop()
            held[tenant.column] -= 1
            taken[tenant.column] -= pages
            left = self._share(tenant, held[tenant.column], taken[tenant.column] + longest)
            # A tenant that would hold less than the newcomer's then does gives nothing more.
            if left < gained:
                continue
            chosen.append(loser)
            if lines[tenant]:
                heapq.heappush(richest, (-left, number, tenant))
        return chosen

    def loser(self, members: list[Req], settled: Iterable[bool]) -> Req:
        """The one of `members` that gives way when pages run out: the last in line of the tenant that holds most.

        `settled[i]`: whether `members[i]` never gave way, or has put out enough tokens since it came back. Others give
        way only where no member is settled: else they might never end. With one tenant `settled` does not count.
        """
        if not self._shares.contended:
            return victim(members, self._policy)
        shares = self._now()
        at_rest = [req for req, moved_on in zip(members, settled, strict=True) if moved_on] or members
        richest = max({self._shares.tenant(req) for req in at_rest}, key=lambda t: (shares[t.column], t.number))
        return victim([req for req in at_rest if req.tenant == richest.name], self._policy)

    def _lines(self, newcomer: Req, rows: Ints) -> dict[Tenant, list[tuple[Req, int, float]]]:
        """The owners of `rows` by tenant, without the tenant of `newcomer`; each line in policy order.

        Entries are (request, pages that it took, pages of the longest cached prefix among the rows of its tenant that
        stay when it and those behind it leave).
        """
        order = self._running.order
        *_, staying = self._parts(order[~np.isin(order, rows)])
        taken, found = self._memory.pages_taken(rows).tolist(), self._memory.pages_found(rows).tolist()
        owners: dict[Tenant, list[tuple[Req, int, int]]] = {}
        for req, *pages in zip(self._running.owners(rows), taken, found, strict=True):
            if req.tenant != newcomer.tenant:
                owners.setdefault(self._shares.tenant(req), []).append((req, *pages))
        lines: dict[Tenant, list[tuple[Req, int, float]]] = {}
        for tenant, line in owners.items():
            longest, lines[tenant] = staying[tenant.column], []
            for req, own, prefix in sorted(line, key=lambda each: self._policy.key(each[0])):
                lines[tenant].append((req, own, longest))
                longest = max(longest, prefix)
        return lines

    def _now(self) -> list[float]:
        """The share of each tenant, by column; 0 for a free column."""
        held, taken, found = self._parts(self._running.order)
        shares = [0.0] * len(held)
        for tenant in self._shares:
            column = tenant.column
            shares[column] = self._share(tenant, held[column], taken[column] + found[column])
        return shares

    def _parts(self, rows: Ints) -> tuple[list[int], list[float], list[float]]:
        """By column of tenant, of `rows`: how many, pages that they took, pages of the longest prefix that one found.

        Rows of one tenant mostly find the same cached prefix, so only the longest counts, once. Where they find
        different prefixes that is too low; the number of rows decides there.
        """
        columns, count = self._shares.columns_of(rows), self._shares.capacity
        held = np.bincount(columns, minlength=count)
        taken = np.bincount(columns, weights=self._memory.pages_taken(rows), minlength=count)
        found = np.zeros(count)
        np.maximum.at(found, columns, self._memory.pages_found(rows))
        return held.tolist(), taken.tolist(), found.tolist()

    def _share(self, tenant: Tenant, rows: float, pages: float) -> float:
        part = max(rows / self._memory.rows.size, pages / self._memory.allocator.num_pages)
        return part / tenant.weight
