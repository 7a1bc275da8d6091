"""Counters that the service keeps itself: calls, refusals, kept streams, tokens of tenants. Label sets are closed."""

from __future__ import annotations

from collections.abc import Callable

import grpc
from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics

from service.metrics import names
from service.metrics.metric import Metric

REJECTION_REASONS: tuple[str, ...] = (
    "INVALID_REQUEST",
    "DUPLICATE_REQUEST_ID",
    "ADAPTER_NOT_FOUND",
    "CONCURRENCY_LIMIT",
    "RATE_LIMIT",
    "TENANT_CONCURRENCY_LIMIT",
    "TENANT_RATE_LIMIT",
    "TENANT_SEQUENCE_LIMIT",
    "TENANT_TOKEN_LIMIT",
    "TENANT_SEQUENCES",
    "TENANT_LOCKED_OUT",
    "OPEN_CALLS",
    "RESUME_BYTES",
    "RESUME_OFF",
    "QUEUE_FULL",
    "MEMORY",
    "DEADLINE_EXCEEDED",
    "STARTING",
    "DRAINING",
    "ENGINE_DEAD",
)
"""Present at 0 from the start, so that Prometheus's `increase()` sees the first one. Other reasons appear when they
first occur."""

CALL_KINDS: tuple[str, ...] = ("health", "facts", "text", "stream", "work")
"""The values of `service.limits.call_kinds.Kind`, each of which is present at 0 from the start."""

CALLER_REFUSALS: tuple[str, ...] = ("UNAUTHENTICATED", "TOKEN_REVOKED", "NOT_PERMITTED")
GONE: tuple[str, ...] = ("expired", "evicted", "stalled", "trimmed")
ATTACHED: tuple[str, ...] = (
    "attached",
    "STREAM_NOT_FOUND",
    "STREAM_EXPIRED",
    "STREAM_EVICTED",
    "STREAM_REPLACED",
    "STREAM_TAKEN_OVER",
    "POSITION_TOO_OLD",
    "POSITION_AHEAD",
    "RESUME_OFF",
)


class RpcMetrics:
    """Counters of the service side, registered in `registry`. Thread-safe."""

    def __init__(self, registry: CollectorRegistry) -> None:
        # Otherwise every counter is doubled by a gauge that holds the time it was created.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._counters = {
            "started": _counter(names.RPC_STARTED, registry),
            "handled": _counter(names.RPC_HANDLED, registry),
            "rejected": _counter(names.REJECTED, registry),
            "turned_away": _counter(names.TURNED_AWAY, registry),
            "slow": _counter(names.SLOW_CONSUMERS, registry),
            "tenant": _counter(names.TENANT_REFUSALS, registry),
            "tenant_tokens": _counter(names.TENANT_TOKENS, registry),
            "gone": _counter(names.KEPT_GONE, registry),
            "attach": _counter(names.ATTACHES, registry),
            "refused": _counter(names.CALLERS_REFUSED, registry),
            "frontend_restarts": _counter(names.FRONTEND_RESTARTS, registry),
        }
        self._gauges = {each: _gauge(each, registry) for each in (names.KEPT_STREAMS, names.KEPT_BYTES)}
        for reason in REJECTION_REASONS:
            self._counters["rejected"].labels(reason)
        for kind in CALL_KINDS:
            self._counters["turned_away"].labels(kind, "OPEN_CALLS")
        for reason in CALLER_REFUSALS:
            self._counters["refused"].labels(reason)
        for how in GONE:
            self._counters["gone"].labels(how)
        for how in ATTACHED:
            self._counters["attach"].labels(how)

    def started(self, method: str) -> None:
        """A handler was entered; `method` is the full name of a registered method."""
        self.add("started", (method.lstrip("/"),))

    def handled(self, method: str, code: grpc.StatusCode) -> None:
        """A handler returned with `code`."""
        self.add("handled", (method.lstrip("/"), code.name))

    def rejected(self, reason: str) -> None:
        """A Generate, Embed, Classify or Score call was refused before its first event, for `reason`."""
        self.add("rejected", (reason,))

    def turned_away(self, kind: str, reason: str) -> None:
        """The gate refused a call; `kind` is one of CALL_KINDS."""
        self.add("turned_away", (kind, reason))

    def slow_consumer(self) -> None:
        """A stream was ended because its client did not read fast enough."""
        self.add("slow", ())

    def caller_refused(self, reason: str) -> None:
        """A caller had no token, certificate or permission for its call; `reason` is one of CALLER_REFUSALS."""
        self.add("refused", (reason,))

    def tenant_refused(self, label: str, reason: str, amount: int = 1) -> None:
        """A tenant's own limit refused `amount` calls; `label` is a name in the tenants file, or OTHER."""
        self.add("tenant", (label, reason), amount)

    def tenant_tokens(self, label: str, kind: str, amount: int) -> None:
        """A tenant's request ended with `amount` tokens of `kind`; `label` is a name in the tenants file, or OTHER."""
        self.add("tenant_tokens", (label, kind), amount)

    def stream_gone(self, how: str) -> None:
        """A kept stream, or the older half of its history, was dropped; `how` is one of GONE."""
        self.add("gone", (how,))

    def attach(self, how: str) -> None:
        """An Attach call began (`how` is "attached"), or was refused for the reason `how`."""
        self.add("attach", (how,))

    def show_kept(self, streams: Callable[[], float], size: Callable[[], float]) -> None:
        """Show the number and the bytes of kept streams by these functions; they are called on the scraper's thread."""
        self._gauges[names.KEPT_STREAMS].set_function(streams)
        self._gauges[names.KEPT_BYTES].set_function(size)

    def frontend_restarted(self) -> None:
        """A front end died and is started again."""
        self.add("frontend_restarts", ())

    def add(self, counter: str, labels: tuple[str, ...], amount: int = 1) -> None:
        """Add `amount` to the counter named `counter` in this class. Raises KeyError for an unknown name."""
        metric = self._counters[counter]
        (metric.labels(*labels) if labels else metric).inc(amount)


def _counter(metric: Metric, registry: CollectorRegistry) -> Counter:
    return Counter(metric.name, metric.help, metric.labels, registry=registry)


def _gauge(metric: Metric, registry: CollectorRegistry) -> Gauge:
    return Gauge(metric.name, metric.help, metric.labels, registry=registry)
