"""Metrics of each engine of a server that has several, by its number; none of a server with one."""

from __future__ import annotations

from service.metrics.metric import Metric

_LABELS = ("replica",)

BY_REPLICA: tuple[Metric, ...] = (
    Metric("slipstream_replica_ready", "gauge", "1 while the engine is sent requests, else 0.", _LABELS, field="ready"),
    Metric("slipstream_replica_running_requests", "gauge", "Requests in its batch.", _LABELS, field="running"),
    Metric("slipstream_replica_waiting_requests", "gauge", "Requests that wait for it.", _LABELS, field="waiting"),
    Metric("slipstream_replica_kv_used_pages", "gauge", "KV pages that its requests hold.", _LABELS, field="kv_used"),
    Metric("slipstream_replica_kv_pages", "gauge", "KV pages that it has.", _LABELS, field="kv_capacity"),
    Metric("slipstream_replica_requests", "counter", "Requests that it was sent.", _LABELS, field="requests"),
    Metric(
        "slipstream_replica_matched_requests",
        "counter",
        "Of these, those whose prompt begins like one that it was sent before.",
        _LABELS,
        field="matched",
    ),
    Metric(
        "slipstream_replica_restarts", "counter", "How often its process was started again.", _LABELS, field="restarts"
    ),
)
