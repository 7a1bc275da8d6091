"""One gate per tenant, in the engine's process: its rate and its calls at once, over all connections and front ends.

A gate is `Admission` with the tenant's own figures, so waiting is bounded and in order, and asyncio-throttle keeps the
rate. It is passed before the limits that all tenants share: one that floods is refused without using those up.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable

from core.errors import Overloaded
from service.admission import CONCURRENCY_LIMIT, RATE_LIMIT, Admission
from service.reloaded import Reloaded
from service.tenants.limits import OTHER, TenantBook, TenantLimits
from service.tenants.refusals import Refusals

MAX_GATES = 4096
"""Past it, gates that nobody stands in are forgotten, the longest unused first."""

MAX_WAITERS = 64
"""Of one tenant; they hold nothing that others wait for, but memory."""


class Hold:
    """A place in a tenant's gate until `release`, which may be called again; `number` is its name between processes."""

    def __init__(self, leave: Callable[[], None] | None = None, number: int = 0) -> None:
        self._leave, self.number = leave, number

    def move(self) -> Hold:
        """The place, for somebody else to release."""
        moved, self._leave = Hold(self._leave, self.number), None
        return moved

    def release(self) -> None:
        """Give the place back."""
        leave, self._leave = self._leave, None
        if leave is not None:
            leave()


class TenantGates:
    """Lets calls in by the limits that `book` has for their tenants; without a book, everybody at once."""

    def __init__(self, book: Reloaded[TenantBook] | None, max_wait: float, refusals: Refusals) -> None:
        self._book, self._max_wait, self._refusals = book, max_wait, refusals
        self._gates: OrderedDict[str, _Gate] = OrderedDict()
        self._known: TenantBook | None = None

    async def enter(self, tenant: str | None, deadline: float | None) -> Hold:
        """Wait for the tenant's turn; raises Overloaded, naming the limit, or DeadlinePassed."""
        if self._book is None or tenant is None:
            return Hold()
        book = self._current(self._book)
        limits = book.of(tenant)
        if limits.none:
            return Hold()
        gate = self._gate(tenant, limits)
        try:
            await gate.admission.enter(deadline)
        except Overloaded as refused:
            self._refusals.note(tenant, book.label(tenant), refused.reason, refused.message)
            raise
        return Hold(gate.admission.leave)

    def label(self, tenant: str) -> str:
        """What metrics call the tenant."""
        return OTHER if self._book is None else self._current(self._book).label(tenant)

    def _current(self, reloaded: Reloaded[TenantBook]) -> TenantBook:
        book = reloaded.current()
        if book is not self._known:
            self._known = book
            for name in book.names:
                self._refusals.expect(name)
        return book

    def _gate(self, tenant: str, limits: TenantLimits) -> _Gate:
        gate = self._gates.get(tenant)
        if gate is None:
            gate = self._gates[tenant] = _Gate(limits, self._max_wait)
            self._forget_idle(len(self._gates) - MAX_GATES)
        self._gates.move_to_end(tenant)
        gate.change(limits)
        return gate

    def _forget_idle(self, count: int) -> None:
        """Drop the `count` longest unused gates that nobody stands in, as far as there are so many."""
        if count > 0:
            for name in [name for name, gate in self._gates.items() if gate.idle][:count]:
                del self._gates[name]


class _Gate:
    def __init__(self, limits: TenantLimits, max_wait: float) -> None:
        self._limits = limits
        self.admission = Admission(
            *_figures(limits), max_wait=max_wait, max_waiters=MAX_WAITERS, told=lambda *why: _told(self._limits, *why)
        )

    @property
    def idle(self) -> bool:
        return not (self.admission.open or self.admission.waiting)

    def change(self, limits: TenantLimits) -> None:
        if limits != self._limits:
            self._limits = limits
            self.admission.resize(*_figures(limits))


def _figures(limits: TenantLimits) -> tuple[float, float | None]:
    at_once = limits.concurrent_requests
    return math.inf if at_once is None else at_once, limits.requests_per_second


def _told(limits: TenantLimits, reason: str, retry_after: float) -> Overloaded:
    words = {
        CONCURRENCY_LIMIT: f"the tenant's limit of {limits.concurrent_requests} requests at once is reached",
        RATE_LIMIT: f"the tenant's limit of {limits.requests_per_second:g} requests per second is reached"
        if limits.requests_per_second is not None
        else "",
    }
    return Overloaded(words[reason], reason=f"TENANT_{reason}", retry_after=retry_after)
