"""Which tenant's prompts are computed next: tenants share a step's budget by the work that was done for them.

Deficit round robin (Shreedhar and Varghese 1995) with the deficits kept as counters of work over weight, as in
start-time fair queueing (Goyal et al. 1996) and in VTC ("Fairness in Serving LLMs", OSDI 2024): the tenant with the
lowest counter is next, for at most its share of the budget. Work is counted in tokens that steps compute, not in calls.
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
"""Tokens charged for a row, beside those of the prompt: outputs that share a cached prompt would else be free."""


def in_its_part(own: int, tenants: int, most: int) -> bool:
    """Whether one of `tenants` with `own` requests in a full line of `most` has no more than an equal part of it."""
    return tenants > 1 and own <= most // tenants


@dataclass(slots=True, eq=False)
class Tenant:
    """A caller that has at least one request waiting or running, and what is counted of it."""

    name: str
    number: int
    """Order of opening, from 1; every tie is decided for the tenant with the lower number."""
    column: int
    """Index in arrays by tenant. A later tenant gets it once this one has left."""
    weight: float = 1.0
    """That of its newest request; above 0."""
    served: float = 0.0
    """Its counter: tokens computed for it while another tenant had work, and `SEQUENCE_COST` a row, over its weight."""
    live: int = 0
    """Its requests that wait or run."""
    rows: int = 0
    """Rows that its requests own."""
    refused: bool = False
    """Whether its first waiting request was refused for want of a row or pages, and none of its requests got one since.
    """

    @property
    def waits(self) -> bool:
        """Whether at least one of its requests has no row."""
        return self.live > self.rows


class FairShare:
    """The tenants that have work, and a clock: the counter of the tenant that was served last.

    `begin` lifts the counters of tenants with prompts to the clock: a tenant gets no credit for time in which it asked
    for nothing. So a tenant that comes, or comes back, is at most one step ahead of the others or behind them. A tenant
    without requests leaves no state. With one tenant nothing is counted.
    """

    def __init__(self, budget: int, num_rows: int) -> None:
        """`budget`: prompt tokens of one step; `num_rows`: request rows, padding row 0 included."""
        self._budget = budget
        self._tenants: dict[str, Tenant] = {}
        self._columns: list[int] = []
        """Columns of tenants that have left, for tenants to come."""
        self._of_row: Ints = np.zeros(num_rows, np.int64)
        """By row: the column of its owner's tenant. Means nothing for a row without an owner."""
        self._opened = self._capacity = 0
        self._clock = 0.0

    @property
    def contended(self) -> bool:
        """Whether two tenants or more have work."""
        return len(self._tenants) > 1

    @property
    def capacity(self) -> int:
        """Length of arrays by tenant: columns in use and free ones."""
        return self._capacity

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._tenants.values())

    def tenant(self, req: Req) -> Tenant:
        """The tenant of `req`, which must be waiting or running."""
        return self._tenants[req.tenant]

    def columns_of(self, rows: Ints) -> Ints:
        """int64[n]: the column of the tenant that owns each of `rows`."""
        return self._of_row[rows]

    def entered(self, req: Req) -> None:
        """Count a new request, which waits. Its weight becomes that of its tenant."""
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
        """`req` got `req.row`. Raises InvariantViolation if its tenant has more rows than requests now."""
        tenant = self._tenants[req.tenant]
        self._of_row[req.row] = tenant.column
        tenant.rows += 1
        tenant.refused = False
        check("tenant_books", tenant.rows <= tenant.live, live=tenant.live, rows=tenant.rows)

    def unseated(self, req: Req) -> None:
        """`req` gives its row back. Raises InvariantViolation if its tenant had none."""
        tenant = self._tenants[req.tenant]
        tenant.rows -= 1
        check("tenant_books", tenant.rows >= 0, live=tenant.live, rows=tenant.rows)

    def left(self, req: Req) -> None:
        """`req` has ended and has no row; a tenant without requests is forgotten.

        Raises InvariantViolation if its tenant has more rows than requests now.
        """
        tenant = self._tenants[req.tenant]
        tenant.live -= 1
        check("tenant_books", tenant.rows <= tenant.live, live=tenant.live, rows=tenant.rows)
        tenant.refused = tenant.refused and tenant.waits
        if tenant.live == 0:
            del self._tenants[req.tenant]
            self._columns.append(tenant.column)

    def begin(self, contenders: list[Tenant]) -> list[int]:
        """Begin the plan of a step in which `contenders` have prompts. Returns the share of each in tokens.

        A tenant computes at most its share before counters are compared again.
        """
        weights = sum(tenant.weight for tenant in contenders)
        for tenant in contenders:
            tenant.served = max(tenant.served, self._clock)
        return [math.ceil(self._budget * tenant.weight / weights) for tenant in contenders]

    def charge(self, tenant: Tenant, tokens: int) -> None:
        """Count `tokens` tokens computed for `tenant`; none where no other tenant has work."""
        if not self.contended:
            return
        self._clock = max(self._clock, tenant.served)
        tenant.served += tokens / tenant.weight

    def generated(self, rows: Ints) -> None:
        """Count one token for each of `rows`, int64[n], which decode in this step. O(n) in one array operation.

        Two limits hold for each tenant: (1) One step counts at most half of its share of the budget, so that its
        prompts go on beside any number of its outputs. (2) Outputs never put it more than a budget ahead of the clock.
        """
        if not self.contended or not len(rows):
            return
        most = self._budget / (2 * sum(tenant.weight for tenant in self._tenants.values()))
        counts = np.bincount(self._of_row[rows], minlength=self._capacity).tolist()
        for tenant in self._tenants.values():
            owed = tenant.served + min(counts[tenant.column] / tenant.weight, most)
            tenant.served = max(tenant.served, min(owed, self._clock + self._budget / tenant.weight))
