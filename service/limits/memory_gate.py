"""No new work while memory is short: above MOST_SHARE of the container's memory, calls are refused unread.

A process past its container's limit is killed, and with it every stream. So new calls are refused with the time to come
back, and open ones go on. Health checks still say SERVING: a pod that was taken out of service for this would move its
load to the next one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from core.errors import Overloaded
from core.machine import give_back_memory, memory_share
from service.access.permissions import is_public
from service.limits.call_kinds import KINDS, Kind
from service.metrics.rpc import RpcMetrics
from service.rpc.interceptors import Context

MOST_SHARE: Final = 0.9
LOOK_SECONDS: Final = 0.25
TRIM_SECONDS: Final = 5.0
"""Seconds between two requests to the allocator to return freed memory: what it keeps would keep the gate shut."""
RETRY_SECONDS: Final = 1.0
REASON: Final = "MEMORY"

STILL_ANSWERED: Final = frozenset(
    {
        *("Abort", "Attach", "UnloadAdapter", "FlushCache"),
        *("GetModelInfo", "GetServerInfo", "GetLoad", "GetLoads", "ListAdapters", "HealthCheck"),
    }
)
"""Methods, by name without the service, that are answered while memory is short: they free something, go on with a
stream or only report. Public methods are answered too."""


class MemoryWatch:
    """Looks at the memory in use every LOOK_SECONDS, on its own thread. Any thread may read `short`, at no cost."""

    def __init__(self) -> None:
        self.short = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="slipstream-memory", daemon=True)
        self._trimmed_at = -TRIM_SECONDS

    def start(self) -> None:
        """Look once now, then start the thread."""
        self.look()
        self._thread.start()

    def close(self) -> None:
        """End the thread at its next look. Idempotent."""
        self._closed.set()

    def look(self) -> None:
        """Set `short`, and have the allocator return freed memory if memory is short."""
        self.short = memory_share() > MOST_SHARE
        if self.short and time.monotonic() - self._trimmed_at > TRIM_SECONDS:
            give_back_memory()
            self._trimmed_at = time.monotonic()

    def _run(self) -> None:
        while not self._closed.wait(LOOK_SECONDS):
            self.look()


class MemoryGate:
    """Refuses calls that take memory while memory is short. Stands before `RequestReads`, so no message is read."""

    def __init__(self, watch: MemoryWatch, metrics: RpcMetrics) -> None:
        self._watch, self._metrics = watch, metrics

    @asynccontextmanager
    async def around(self, method: str, _context: Context) -> AsyncIterator[None]:
        """Run a call inside. Raises Overloaded while memory is short."""
        if self._watch.short and not _still_answered(method):
            kind = KINDS[method]
            self._metrics.turned_away(kind.value, REASON)
            if kind is Kind.WORK:
                self._metrics.rejected(REASON)
            raise Overloaded("the server is short of memory", reason=REASON, retry_after=RETRY_SECONDS)
        yield


def _still_answered(method: str) -> bool:
    return is_public(method) or method.rpartition("/")[2] in STILL_ANSWERED
