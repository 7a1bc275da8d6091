"""Whose prompts go on next: a step's budget is shared between tenants by the work that was done for them.

Deficit round robin (Shreedhar and Varghese 1995) with the deficits kept as counters of work over weight, as in
start-time fair queueing (Goyal et al. 1996) and in VTC ("Fairness in Serving LLMs", OSDI 2024): the tenant with the
lowest counter is next, for at most its share of the budget. Work is what a step computes, not how many calls asked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from core.invariants import check
from core.types.arrays import Ints
from core.types.request import Req

SEQUENCE_COST = 16
"""Tokens that a seat costs beside those of its prompt: outputs that share a cached prompt are not free."""


@dataclass(slots=True, eq=False)
class Tenant:
    """One caller while any request of it waits or runs."""

    name: str
    number: int
    """In order of opening; a tie goes to the lower one."""
    column: int
    """Place in arrays by tenant; used again once the tenant has left."""
    weight: float = 1.0
    """Of its newest request."""
    served: float = 0.0
    """Tokens computed for it while another tenant had work, and what its seats cost, over its weight."""
    live: int = 0
    """Requests that wait or run."""
    rows: int = 0
    refused: bool = False
    """Whether its first in line was refused for want of a row or of pages, and nothing of it was seated since."""

    @property
    def waits(self) -> bool:
        """Whether a request of it has no row."""
        return self.live > self.rows


class FairShare:
    """The tenants that have work, and a clock: the counter of the tenant that was served last.

    No counter of a tenant with a prompt is behind the clock: what was not asked for is not made up for, so a tenant
    that comes (back) is neither ahead of the others nor behind them by more than a step. A tenant without requests
    leaves no state. With one tenant nothing is counted.
    """

    def __init__(self, budget: int, num_rows: int) -> None:
        """`budget`: prompt tokens of one step; `num_rows`: rows with the padding one."""
        self._budget = budget
        self._tenants: dict[str, Tenant] = {}
        self._columns: list[int] = []
        self._of_row: Ints = np.zeros(num_rows, np.int64)
        self._opened = self._capacity = 0
        self._clock = 0.0

    @property
    def contended(self) -> bool:
        """Whether two tenants or more have work."""
        return len(self._tenants) > 1

    @property
    def capacity(self) -> int:
        """Slots of tenants, free ones included."""
        return self._capacity

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._tenants.values())

    def tenant(self, req: Req) -> Tenant:
        """Of a request that waits or runs."""
        return self._tenants[req.tenant]

    def columns_of(self, rows: Ints) -> Ints:
        """int64[n]: the column of the tenant that owns each of `rows`."""
        return self._of_row[rows]

    def entered(self, req: Req) -> None:
        """A new request waits."""
        tenant = self._tenants.get(req.tenant)
        if tenant is None:
            if not self._tenants:
                self._clock = 0.0
            self._opened += 1
            tenant = Tenant(req.tenant, self._opened, self._columns.pop() if self._columns else self._capacity)
            self._capacity = max(self._capacity, tenant.column + 1)
            self._tenants[req.tenant] = tenant
        tenant.weight = req.weight
        tenant.live += 1

    def seated(self, req: Req) -> None:
        """It has a row."""
        tenant = self._tenants[req.tenant]
        self._of_row[req.row] = tenant.column
        tenant.rows += 1
        tenant.refused = False
        check("tenant_books", tenant.rows <= tenant.live, live=tenant.live, rows=tenant.rows)

    def unseated(self, req: Req) -> None:
        """It gave its row back."""
        tenant = self._tenants[req.tenant]
        tenant.rows -= 1
        check("tenant_books", tenant.rows >= 0, live=tenant.live, rows=tenant.rows)

    def left(self, req: Req) -> None:
        """It has ended, and has no row."""
        tenant = self._tenants[req.tenant]
        tenant.live -= 1
        check("tenant_books", tenant.rows <= tenant.live, live=tenant.live, rows=tenant.rows)
        tenant.refused = tenant.refused and tenant.waits
        if tenant.live == 0:
            del self._tenants[req.tenant]
            self._columns.append(tenant.column)

    def begin(self, contenders: list[Tenant]) -> list[int]:
        """A step is planned in which these have prompts. Tokens that each may have before the others are looked at
        again: its share of the budget.
        """
        weights = sum(tenant.weight for tenant in contenders)
        for tenant in contenders:
            tenant.served = max(tenant.served, self._clock)
        return [math.ceil(self._budget * tenant.weight / weights) for tenant in contenders]

    def charge(self, tenant: Tenant, tokens: int) -> None:
        """So many were computed for it. Free where no other tenant has work."""
        if not self.contended:
            return
        self._clock = max(self._clock, tenant.served)
        tenant.served += tokens / tenant.weight

    def generated(self, rows: Ints) -> None:
        """A step computes one token for each of `rows`. One array operation, and a sum per tenant.

        So much is charged as leaves each tenant half of its share of the budget, so that its prompts go on beside any
        number of its outputs, and no more than one budget is ever owed.
        """
        if not self.contended or not len(rows):
            return
        most = self._budget / (2 * sum(tenant.weight for tenant in self._tenants.values()))
        counts = np.bincount(self._of_row[rows], minlength=self._capacity).tolist()
        for tenant in self._tenants.values():
            owed = tenant.served + min(counts[tenant.column] / tenant.weight, most)
            tenant.served = max(tenant.served, min(owed, self._clock + self._budget / tenant.weight))
