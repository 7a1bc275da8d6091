"""Counters that the service keeps itself: calls, refusals, evictions. Label sets are closed."""

from __future__ import annotations

import grpc
from prometheus_client import CollectorRegistry, Counter, disable_created_metrics

from service.metrics import names
from service.metrics.metric import Metric

REJECTION_REASONS: tuple[str, ...] = (
    "INVALID_REQUEST",
    "DUPLICATE_REQUEST_ID",
    "ADAPTER_NOT_FOUND",
    "CONCURRENCY_LIMIT",
    "RATE_LIMIT",
    "QUEUE_FULL",
    "DEADLINE_EXCEEDED",
    "STARTING",
    "DRAINING",
    "ENGINE_DEAD",
)
"""Present at 0 from the start, so that `increase()` sees the first one; others of core appear when they occur."""


class RpcMetrics:
    """Counters of the service side, registered in `registry`. Thread-safe."""

    def __init__(self, registry: CollectorRegistry) -> None:
        # Otherwise every counter is doubled by a gauge that holds the time it was created.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._counters = {
            "started": _counter(names.RPC_STARTED, registry),
            "handled": _counter(names.RPC_HANDLED, registry),
            "rejected": _counter(names.REJECTED, registry),
            "slow": _counter(names.SLOW_CONSUMERS, registry),
            "frontend_restarts": _counter(names.FRONTEND_RESTARTS, registry),
        }
        for reason in REJECTION_REASONS:
            self._counters["rejected"].labels(reason)

    def started(self, method: str) -> None:
        """A handler was entered; `method` is the full name of a registered method."""
        self.add("started", (method.lstrip("/"),))

    def handled(self, method: str, code: grpc.StatusCode) -> None:
        """A handler returned with `code`."""
        self.add("handled", (method.lstrip("/"), code.name))

    def rejected(self, reason: str) -> None:
        """A Generate call was refused before its first event."""
        self.add("rejected", (reason,))

    def slow_consumer(self) -> None:
        """A stream was ended because its client did not read fast enough."""
        self.add("slow", ())

    def frontend_restarted(self) -> None:
        """A front end died and is started again."""
        self.add("frontend_restarts", ())

    def add(self, counter: str, labels: tuple[str, ...], amount: int = 1) -> None:
        """Add to one of the counters by its name here. Raises KeyError."""
        metric = self._counters[counter]
        (metric.labels(*labels) if labels else metric).inc(amount)


def _counter(metric: Metric, registry: CollectorRegistry) -> Counter:
    return Counter(metric.name, metric.help, metric.labels, registry=registry)
