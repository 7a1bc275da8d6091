"""The audit log: one line of JSON for each act that changes or shows what is others', and for refused callers.

Lines hold names of callers and addresses, methods and outcomes; never a token, a prompt, an output, or anything of a
message that a handler did not `note`. A flood of refusals, or of a tenant's subscriptions and flushes, is a line now
and then with the count of those that are left out; metrics count all refusals.
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
    """A call that has a line, and what its handler has to say."""

    begun: Callable[[], None]
    facts: dict[str, str] = field(default_factory=dict)


_act: ContextVar[_Act | None] = ContextVar("slipstream_audit_act", default=None)


def note(**facts: str) -> None:
    """Have the audit line of this call tell `facts` too; nothing happens within a call that has none."""
    act = _act.get()
    if act is not None:
        act.facts.update({name: value[:MOST_NOTED_CHARS] for name, value in facts.items()})


def begun() -> None:
    """Write a line for this call now, beside that of its end, which may be days away."""
    act = _act.get()
    if act is not None:
        act.begun()


class Audit:
    """What the calls of one server leave in the audit log."""

    def __init__(self, metrics: RpcMetrics) -> None:
        self._metrics = metrics
        # Apart, so that a flood of refusals, for which a caller needs no token, hides no act.
        self._acts, self._refusals = audit_log.Floods(), audit_log.Floods()
        self._summary: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def around(self, method: str, context: Context) -> AsyncIterator[None]:
        """Around a call, inside of what turns errors into statuses and outside of what names and refuses callers."""
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
        """A flood that ends leaves no line to count it in."""
        if self._summary is None:
            self._summary = asyncio.get_running_loop().call_later(audit_log.QUIET_SECONDS, self._tell)

    def _tell(self) -> None:
        self._summary = None
        for kind, floods in (("acts", self._acts), ("refusals", self._refusals)):
            left_out = floods.take_left_out()
            if left_out is not None:
                audit_log.write("left out", of=kind, left_out=left_out)
