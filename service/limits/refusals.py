"""Refusals of tenants' calls: each one is counted in a metric, and a burst of them is one line of the log."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from service.access.tenant_file import MAX_TENANTS, OTHER

log = logging.getLogger(__name__)

QUIET_SECONDS = 10.0
"""Refusals less than so many seconds apart are one burst."""

LONGEST_SECONDS = 60.0
"""Seconds after which a burst that still lasts gets another line."""

REASONS = (
    "TENANT_RATE_LIMIT",
    "TENANT_CONCURRENCY_LIMIT",
    "TENANT_SEQUENCE_LIMIT",
    "TENANT_TOKEN_LIMIT",
    "TENANT_SEQUENCES",
    "TENANT_LOCKED_OUT",
    "RESUME_BYTES",
)


@dataclass(slots=True)
class _Burst:
    began: float
    latest: float
    count: int = 1


class Refusals:
    """Counts and logs refusals; `note` each one. A burst is one tenant's, for one reason.

    `count(label, reason, amount)` adds to the metric. It gets at most `MAX_TENANTS` + 1 labels in the life of the
    process.
    """

    def __init__(self, count: Callable[[str, str, int], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._count, self._clock = count, clock
        self._labels = {OTHER}
        self._bursts: OrderedDict[tuple[str, str], _Burst] = OrderedDict()
        self.expect(OTHER)

    def expect(self, label: str) -> None:
        """Set the label's counters to 0 before its first refusal, as Prometheus's `increase()` needs them."""
        for reason in REASONS:
            self._count(self.bounded(label), reason, 0)

    def note(self, tenant: str, label: str, reason: str, told: str) -> None:
        """Count one refusal of `tenant` for `reason`; log it, with its text `told`, if it begins a burst."""
        self._count(self.bounded(label), reason, 1)
        key, now = (tenant, reason), self._clock()
        burst = self._bursts.get(key)
        if burst is not None and now - burst.latest < QUIET_SECONDS and now - burst.began < LONGEST_SECONDS:
            burst.latest, burst.count = now, burst.count + 1
            return
        before = "" if burst is None else f"; {burst.count} refusals in the burst before"
        log.warning("tenant %r is refused: %s (%s)%s", tenant, told, reason, before)
        self._bursts[key] = _Burst(now, now)
        self._bursts.move_to_end(key)
        while len(self._bursts) > MAX_TENANTS:
            self._bursts.popitem(last=False)

    def bounded(self, label: str) -> str:
        """`label`, or OTHER for a new label once there are `MAX_TENANTS` others."""
        # Each new tenants file can bring new names, and a series of the metric is never removed.
        if label not in self._labels:
            if len(self._labels) > MAX_TENANTS:
                return OTHER
            self._labels.add(label)
        return label
