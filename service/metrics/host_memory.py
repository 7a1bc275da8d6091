"""Metrics of what host memory keeps: keys and values of prefixes, and of retracted requests."""

from __future__ import annotations

from service.metrics.metric import Metric

METRICS: tuple[Metric, ...] = (
    Metric(
        "slipstream_host_cache_bytes",
        "gauge",
        "Bytes of host memory that hold keys and values of prefixes and of retracted requests.",
        field="host_cache_bytes",
    ),
    Metric(
        "slipstream_host_fetched_tokens",
        "counter",
        "Tokens of prefixes that came back from host memory and were not computed again.",
        field="host_fetched_tokens",
    ),
    Metric(
        "slipstream_host_kept_tokens",
        "counter",
        "Tokens of prefixes that were copied to host memory.",
        field="host_kept_tokens",
    ),
    Metric(
        "slipstream_host_evicted_tokens",
        "counter",
        "Tokens of prefixes whose copies in host memory gave way to others.",
        field="host_evicted_tokens",
    ),
    Metric(
        "slipstream_rejoined_requests",
        "counter",
        "Retracted requests that went on from host memory, without a prefill.",
        field="rejoined_requests",
    ),
    Metric(
        "slipstream_host_copies_dropped",
        "counter",
        "Retracted requests that left no copy: host memory had no room, or no page ended yet.",
        field="host_copies_dropped",
    ),
)
