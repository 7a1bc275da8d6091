"""Counters that the service keeps itself: calls, refusals, evictions. Label sets are closed."""

from __future__ import annotations

import grpc
from prometheus_client import CollectorRegistry, Counter, disable_created_metrics

from service.metrics import names
from service.metrics.names import Metric

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
        self._started = _counter(names.RPC_STARTED, registry)
        self._handled = _counter(names.RPC_HANDLED, registry)
        self._rejected = _counter(names.REJECTED, registry)
        self._slow = _counter(names.SLOW_CONSUMERS, registry)
        for reason in REJECTION_REASONS:
            self._rejected.labels(reason)

    def started(self, method: str) -> None:
        """A handler was entered; `method` is the full name of a registered method."""
        self._started.labels(method.lstrip("/")).inc()

    def handled(self, method: str, code: grpc.StatusCode) -> None:
        """A handler returned with `code`."""
        self._handled.labels(method.lstrip("/"), code.name).inc()

    def rejected(self, reason: str) -> None:
        """A Generate call was refused before its first event."""
        self._rejected.labels(reason).inc()

    def slow_consumer(self) -> None:
        """A stream was ended because its client did not read fast enough."""
        self._slow.inc()


def _counter(metric: Metric, registry: CollectorRegistry) -> Counter:
    return Counter(metric.name, metric.help, metric.labels, registry=registry)
