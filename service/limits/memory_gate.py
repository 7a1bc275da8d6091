"""No new work while memory is short: above nine tenths of the container's, calls are refused before they are read.

A process past its container's limit is killed, and with it every stream. So new calls are told to come back, open ones
go on, and health checks say SERVING: a pod that is taken out for it would move its load to the next one.
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
"""Between two requests to the allocator to return what was freed: what it keeps would keep the gate shut."""
RETRY_SECONDS: Final = 1.0
REASON: Final = "MEMORY"

STILL_ANSWERED: Final = frozenset(
    {
        *("Abort", "Attach", "UnloadAdapter", "FlushCache"),
        *("GetModelInfo", "GetServerInfo", "GetLoad", "GetLoads", "ListAdapters", "HealthCheck"),
    }
)
"""Methods, by their bare names, that free something, go on with something or look on; public ones are answered too."""


class MemoryWatch:
    """Looks at the memory in use from a thread of its own; `short` may be read from anywhere at no cost."""

    def __init__(self) -> None:
        self.short = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="slipstream-memory", daemon=True)
        self._trimmed_at = -TRIM_SECONDS

    def start(self) -> None:
        """Look now, and from now on."""
        self.look()
        self._thread.start()

    def close(self) -> None:
        """Look no more. Idempotent."""
        self._closed.set()

    def look(self) -> None:
        """Once."""
        self.short = memory_share() > MOST_SHARE
        if self.short and time.monotonic() - self._trimmed_at > TRIM_SECONDS:
            give_back_memory()
            self._trimmed_at = time.monotonic()

    def _run(self) -> None:
        while not self._closed.wait(LOOK_SECONDS):
            self.look()


class MemoryGate:
    """Refuses calls that take memory while `watch` says that it is short. It stands before `RequestReads`."""

    def __init__(self, watch: MemoryWatch, metrics: RpcMetrics) -> None:
        self._watch, self._metrics = watch, metrics

    @asynccontextmanager
    async def around(self, method: str, _context: Context) -> AsyncIterator[None]:
        """Around a call. Raises Overloaded."""
        if self._watch.short and not _still_answered(method):
            kind = KINDS[method]
            self._metrics.turned_away(kind.value, REASON)
            if kind is Kind.WORK:
                self._metrics.rejected(REASON)
            raise Overloaded("the server is short of memory", reason=REASON, retry_after=RETRY_SECONDS)
        yield


def _still_answered(method: str) -> bool:
    return is_public(method) or method.rpartition("/")[2] in STILL_ANSWERED
