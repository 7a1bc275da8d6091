"""What was refused to whom: every refusal is counted, and a burst of them is one line of the log."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from service.access.tenant_file import MAX_TENANTS, OTHER

log = logging.getLogger(__name__)

QUIET_SECONDS = 10.0
"""Refusals less than this apart are one burst."""

LONGEST_SECONDS = 60.0
"""A burst that lasts longer is told of again."""

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
    """`note` each refusal. `count` is given (label, reason); labels are at most `MAX_TENANTS` and one, for ever."""

    def __init__(self, count: Callable[[str, str, int], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._count, self._clock = count, clock
        self._labels = {OTHER}
        self._bursts: OrderedDict[tuple[str, str], _Burst] = OrderedDict()
        self.expect(OTHER)

    def expect(self, label: str) -> None:
        """Have the label's counters at 0 before its first refusal, as `increase()` needs them."""
        for reason in REASONS:
            self._count(self.bounded(label), reason, 0)

    def note(self, tenant: str, label: str, reason: str, told: str) -> None:
        """`tenant` was refused for `reason`, in the words `told`."""
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
        """`label`, or that of tenants which the file does not list once there were too many."""
        # The file can be replaced by others for as long as the process lives; series would only ever be added.
        if label not in self._labels:
            if len(self._labels) > MAX_TENANTS:
                return OTHER
            self._labels.add(label)
        return label
