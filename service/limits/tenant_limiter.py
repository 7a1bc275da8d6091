"""One gate per tenant, in the engine's process: its calls, sequences and tokens, over all connections and front ends.

A call passes its tenant's gate before the limits that all tenants share, so a tenant that floods is refused without
using those up. A gate has a line for calls and one for sequences (`Admission`), so waiting is bounded and in order. A
call that lacks tokens is refused at once, with the seconds after which there will be enough.
"""

from __future__ import annotations

import math
from collections import OrderedDict

from core.errors import Overloaded, SlipstreamError
from service.access.reloaded_file import Reloaded
from service.access.tenant_file import OTHER, TenantBook, TenantLimits
from service.errors import TenantLockedOut, TenantSequences
from service.limits.admission import CONCURRENCY_LIMIT, RATE_LIMIT, Admission
from service.limits.hold import Hold
from service.limits.refusals import Refusals
from service.limits.token_budget import TokenBudget
from service.limits.work import ONE_SEQUENCE, Work

MAX_GATES = 4096
"""Number of gates past which idle ones are forgotten, the longest unused first."""

MAX_WAITERS = 64
"""Calls of one tenant that wait in one line. Beside memory they hold nothing that other tenants need."""

SEQUENCE_LIMIT, TOKEN_LIMIT = "TENANT_SEQUENCE_LIMIT", "TENANT_TOKEN_LIMIT"


class TenantGates:
    """Admits calls by the limits that `book` has for their tenants; without a book it admits every call at once.

    A call waits at most `max_wait` seconds in each line. `refusals` counts and logs. Event-loop thread only.
    """

    def __init__(self, book: Reloaded[TenantBook] | None, max_wait: float, refusals: Refusals) -> None:
        self._book, self._max_wait, self._refusals = book, max_wait, refusals
        self._gates: OrderedDict[str, _Gate] = OrderedDict()
        self._known: TenantBook | None = None

    def refuse_hopeless(self, tenant: str | None) -> None:
        """Raise Overloaded or TenantLockedOut if `enter` would refuse any work at once. Takes no place, never waits."""
        gate = None if tenant is None else self._gate(tenant)
        if tenant is not None and gate is not None:
            try:
                gate.refuse_hopeless()
            except SlipstreamError as refused:
                self._note(tenant, refused)
                raise

    async def enter(self, tenant: str | None, deadline: float | None, work: Work = ONE_SEQUENCE) -> Hold:
        """Wait until the tenant's limits have room for `work`; `deadline` is a `time.monotonic()` instant.

        Raises Overloaded, whose reason names the limit, DeadlinePassed, TenantLockedOut, and TenantSequences for a
        request with more sequences than the tenant may have at all.
        """
        gate = None if tenant is None else self._gate(tenant)
        if tenant is None or gate is None:
            return Hold(weight=self._weight(tenant))
        try:
            hold = await gate.enter(deadline, work)
            hold.weight = self._weight(tenant)
            return hold
        except (Overloaded, TenantLockedOut, TenantSequences) as refused:
            self._note(tenant, refused)
            raise

    def label(self, tenant: str) -> str:
        """The tenant's label in metrics: its name if the tenants file lists it, else OTHER."""
        return OTHER if self._book is None else self._current(self._book).label(tenant)

    def _note(self, tenant: str, refused: SlipstreamError) -> None:
        self._refusals.note(tenant, self.label(tenant), refused.reason, refused.message)

    def _current(self, reloaded: Reloaded[TenantBook]) -> TenantBook:
        book = reloaded.current()
        if book is not self._known:
            self._known = book
            for name in book.names:
                self._refusals.expect(name)
        return book

    def _weight(self, tenant: str | None) -> float:
        return 1.0 if self._book is None or tenant is None else self._current(self._book).of(tenant).weight

    def _gate(self, tenant: str) -> _Gate | None:
        """The tenant's gate; None where it has no limits."""
        if self._book is None:
            return None
        limits = self._current(self._book).of(tenant)
        if limits.none:
            return None
        gate = self._gates.get(tenant)
        if gate is None:
            # Before the new gate, which is idle too: with all others in use it would be the one to go.
            self._forget_idle(len(self._gates) + 1 - MAX_GATES)
            gate = self._gates[tenant] = _Gate(limits, self._max_wait)
        self._gates.move_to_end(tenant)
        gate.change(limits)
        return gate

    def _forget_idle(self, count: int) -> None:
        """Drop the `count` longest unused of the idle gates, or all idle gates if they are fewer."""
        if count > 0:
            for name in [name for name, gate in self._gates.items() if gate.idle][:count]:
                del self._gates[name]


class _Gate:
    """The two lines and the token budget of one tenant."""

    def __init__(self, limits: TenantLimits, max_wait: float) -> None:
        self._limits = limits

        def sequences_told(_reason: str, retry_after: float) -> Overloaded:
            words = f"the tenant's limit of {self._limits.concurrent_sequences} sequences at once is reached"
            return Overloaded(words, reason=SEQUENCE_LIMIT, retry_after=retry_after)

        self._calls = Admission(
            *_figures(limits), max_wait=max_wait, max_waiters=MAX_WAITERS, told=lambda *why: _told(self._limits, *why)
        )
        self._sequences = Admission(
            _most(limits.concurrent_sequences), max_wait=max_wait, max_waiters=MAX_WAITERS, told=sequences_told
        )
        self._lines = (self._calls, self._sequences)
        self._tokens = None if limits.tokens_per_minute is None else TokenBudget(limits.tokens_per_minute)

    @property
    def idle(self) -> bool:
        """Whether forgetting the gate would change nothing, but for its rate of calls."""
        empty = not any(each.open or each.waiting for each in self._lines)
        return empty and (self._tokens is None or self._tokens.full)

    def change(self, limits: TenantLimits) -> None:
        """Apply other limits from now on. Held places and used tokens stay, and count against the new limits."""
        if limits == self._limits:
            return
        self._limits, per_minute = limits, limits.tokens_per_minute
        self._calls.resize(*_figures(limits))
        self._sequences.resize(_most(limits.concurrent_sequences), None)
        if per_minute is None:
            self._tokens = None
        elif self._tokens is None:
            self._tokens = TokenBudget(per_minute)
        else:
            self._tokens.resize(per_minute)

    def refuse_hopeless(self) -> None:
        if self._limits.locked:
            raise TenantLockedOut("this tenant is locked out of this server")
        self._calls.refuse_hopeless()
        self._sequences.refuse_hopeless()

    async def enter(self, deadline: float | None, work: Work) -> Hold:
        self.refuse_hopeless()
        most = self._limits.concurrent_sequences
        if most is not None and work.sequences > most:
            words = f"the request has {work.sequences} sequences, and this tenant may have {most} at once"
            raise TenantSequences(words)
        # Before the lines, in which a request that lacks tokens would wait for nothing.
        charge, budget = self._charge(work.tokens), self._tokens
        try:
            await self._calls.enter(deadline)
            try:
                await self._sequences.enter(deadline, work.sequences)
            except BaseException:
                self._calls.leave()
                raise
        except BaseException:
            if budget is not None:
                budget.give(charge)
            raise

        def leave(used: int) -> None:
            self._sequences.leave(work.sequences)
            self._calls.leave()
            if budget is not None:
                budget.give(charge - used)

        return Hold(leave, charge=charge, late=None if budget is None else lambda tokens: budget.give(-tokens))

    def _charge(self, tokens: int) -> int:
        """Take the charge of a request that may need `tokens` from the budget. Raises Overloaded if it has too few."""
        if self._tokens is None or not tokens:
            return 0
        charge = self._tokens.take(tokens)
        if not charge:
            words = f"the tenant's limit of {self._limits.tokens_per_minute:g} tokens per minute is reached"
            raise Overloaded(words, reason=TOKEN_LIMIT, retry_after=self._tokens.wait(tokens))
        return charge


def _most(limit: int | None) -> float:
    return math.inf if limit is None else limit


def _figures(limits: TenantLimits) -> tuple[float, float | None]:
    return _most(limits.concurrent_requests), limits.requests_per_second


def _told(limits: TenantLimits, reason: str, retry_after: float) -> Overloaded:
    words = {
        CONCURRENCY_LIMIT: f"the tenant's limit of {limits.concurrent_requests} requests at once is reached",
        RATE_LIMIT: f"the tenant's limit of {limits.requests_per_second:g} requests per second is reached"
        if limits.requests_per_second is not None
        else "",
    }
    return Overloaded(words[reason], reason=f"TENANT_{reason}", retry_after=retry_after)
