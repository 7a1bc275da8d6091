"""The audit log: one line of JSON for each call of an OWN or ADMIN method, and for each refused caller.

Lines hold names of callers and addresses, methods and outcomes. They never hold a token, a prompt, an output, or
anything of a message that a handler did not `note`. A flood of refusals, or of a tenant's subscriptions and flushes, is
thinned out (`service.process.audit_log.Floods`): later lines give the number left out. Metrics count all refusals.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Final

from core.errors import SlipstreamError
from service.access.caller import address_of, caller_name
from service.access.permissions import METHODS, Permission
from service.errors import NotPermitted, Unauthenticated
from service.metrics.rpc import RpcMetrics
from service.process import audit_log
from service.rpc.interceptors import Context

MOST_NOTED_CHARS: Final = 200


@dataclass(slots=True)
class _Act:
    """A call that has a line, and the facts that its handler adds to it. `begun` writes a line at once."""

    begun: Callable[[], None]
    facts: dict[str, str] = field(default_factory=dict)


_act: ContextVar[_Act | None] = ContextVar("slipstream_audit_act", default=None)


def note(**facts: str) -> None:
    """Add `facts` to the audit line of this call, each cut to MOST_NOTED_CHARS. No-op in a call that has no line."""
    act = _act.get()
    if act is not None:
        act.facts.update({name: value[:MOST_NOTED_CHARS] for name, value in facts.items()})


def begun() -> None:
    """Write a line for this call now, beside the one at its end, which may be days away. No-op in other calls."""
    act = _act.get()
    if act is not None:
        act.begun()


class Audit:
    """Writes the audit lines of one server's calls."""

    def __init__(self, metrics: RpcMetrics) -> None:
        self._metrics = metrics
        # Apart, so that a flood of refusals, for which a caller needs no token, hides no act.
        self._acts, self._refusals = audit_log.Floods(), audit_log.Floods()
        self._summary: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def around(self, method: str, context: Context) -> AsyncIterator[None]:
        """Run a call inside, and write its line when it ends.

        Stands inside `errors_to_statuses`, so that it sees the error itself. Stands outside the interceptors that name
        and refuse callers, so that it sees their refusals.
        """
        acts, began = METHODS.get(method) in (Permission.OWN, Permission.ADMIN), time.monotonic()
        if acts:
            _act.set(_Act(lambda: self._acted(method, context, "begun", None)))
        try:
            yield
        except (Unauthenticated, NotPermitted) as refused:
            self._refused(method, context, refused)
            raise
        except BaseException as error:
            if acts:
                outcome = error.reason if isinstance(error, SlipstreamError) else type(error).__name__
                self._acted(method, context, outcome, time.monotonic() - began)
            raise
        if acts:
            self._acted(method, context, "OK", time.monotonic() - began)

    def _acted(self, method: str, context: Context, outcome: str, seconds: float | None) -> None:
        caller, address = caller_name.get(), address_of(context.peer())
        # Admins are few and trusted; every act of theirs has its line.
        if METHODS[method] is not Permission.ADMIN and not self._acts.admits(caller or address, method, outcome):
            self._tell_later()
            return
        act, took = _act.get(), None if seconds is None else round(seconds, 3)
        told = {} if act is None else act.facts
        audit_log.write("act", method=method, caller=caller, peer=address, outcome=outcome, seconds=took, **told)

    def _refused(self, method: str, context: Context, refused: SlipstreamError) -> None:
        self._metrics.caller_refused(refused.reason)
        caller, address = caller_name.get(), address_of(context.peer())
        if not self._refusals.admits(caller or "", address, refused.reason):
            self._tell_later()
            return
        left_out = self._refusals.take_left_out()
        audit_log.write("refused", method=method, caller=caller, peer=address, reason=refused.reason, left_out=left_out)

    def _tell_later(self) -> None:
        """Write the number of lines left out after QUIET_SECONDS: no later line may come that could hold it."""
        if self._summary is None:
            self._summary = asyncio.get_running_loop().call_later(audit_log.QUIET_SECONDS, self._tell)

    def _tell(self) -> None:
        self._summary = None
        for kind, floods in (("acts", self._acts), ("refusals", self._refusals)):
            left_out = floods.take_left_out()
            if left_out is not None:
                audit_log.write("left out", of=kind, left_out=left_out)
