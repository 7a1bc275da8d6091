"""The one gate that every call passes, before its message is read: refusing a call costs less than serving it.

It stands behind the interceptor that names callers and before `RequestReads`. A caller is a name where calls have one,
else an address without its port. Limits that need the message (sequences, tokens) follow in `OpenCalls`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from core.errors import Overloaded, SlipstreamError, Unsupported
from service.access.caller import address_of, caller_address, caller_name, caller_of
from service.access.reloaded_file import Reloaded
from service.access.tenant_file import TenantBook
from service.config.server_config import ServerConfig
from service.errors import TenantLockedOut
from service.limits.call_kinds import KINDS, Kind
from service.limits.refusals import Refusals
from service.metrics.rpc import RpcMetrics
from service.rpc.interceptors import Context

OPEN_CALLS: Final = "OPEN_CALLS"


class CallGate:
    """Refuses three kinds of calls: (1) of a caller that has too many open; (2) of a tenant that is locked out;
    (3) work that could not be admitted now.

    `refuse_hopeless(tenant)` raises the error with which any work of the tenant would be refused at once. Event-loop
    thread only.
    """

    def __init__(
        self,
        config: ServerConfig,
        metrics: RpcMetrics,
        book: Reloaded[TenantBook] | None = None,
        refuse_hopeless: Callable[[str | None], None] = lambda _tenant: None,
    ) -> None:
        self._most = {kind: kind.most_open(config) for kind in Kind}
        self._metrics, self._book, self._refuse_hopeless = metrics, book, refuse_hopeless
        self._locked_out = Refusals(metrics.tenant_refused)
        self._open: Counter[tuple[str, Kind]] = Counter()

    @asynccontextmanager
    async def around(self, method: str, context: Context) -> AsyncIterator[None]:
        """Run a call inside. Raises Overloaded, TenantLockedOut, Unsupported, and what `refuse_hopeless` does."""
        kind = KINDS.get(method)
        if kind is None:
            raise Unsupported("this method has no place at the gate, so it is not served")
        tenant = caller_name.get()
        caller_address.set(address_of(context.peer()))
        mine = (caller_of(context), kind)
        try:
            self._refuse(tenant, mine)
        except SlipstreamError as refused:
            self._metrics.turned_away(kind.value, refused.reason)
            if kind is Kind.WORK:
                self._metrics.rejected(refused.reason)
            raise
        self._open[mine] += 1
        try:
            yield
        finally:
            self._open[mine] -= 1
            if not self._open[mine]:
                del self._open[mine]

    def _refuse(self, tenant: str | None, mine: tuple[str, Kind]) -> None:
        if self._book is not None and tenant is not None:
            self._refuse_locked_out(tenant, self._book.current())
        if self._open[mine] >= self._most[mine[1]]:
            raise Overloaded("too many calls of this client are open", reason=OPEN_CALLS)
        if mine[1] is Kind.WORK:
            self._refuse_hopeless(tenant)

    def _refuse_locked_out(self, tenant: str, book: TenantBook) -> None:
        if book.of(tenant).locked:
            locked = TenantLockedOut("this tenant is locked out of this server")
            self._locked_out.note(tenant, book.label(tenant), locked.reason, locked.message)
            raise locked
