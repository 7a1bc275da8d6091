"""Metrics of what host memory and files keep: keys and values of prefixes, and of retracted requests."""

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
        "slipstream_disk_cache_bytes",
        "gauge",
        "Bytes of the files that keep prefixes.",
        field="disk_cache_bytes",
    ),
    Metric(
        "slipstream_disk_fetched_tokens",
        "counter",
        "Tokens of prefixes that were read from files, and not computed again.",
        field="disk_fetched_tokens",
    ),
    Metric(
        "slipstream_disk_kept_tokens",
        "counter",
        "Tokens of prefixes that were written to files.",
        field="disk_kept_tokens",
    ),
    Metric(
        "slipstream_disk_evicted_tokens",
        "counter",
        "Tokens of prefixes whose files gave way to others.",
        field="disk_evicted_tokens",
    ),
    Metric(
        "slipstream_disk_skipped_tokens",
        "counter",
        "Tokens of prefixes that were not written to files, since the disk was behind.",
        field="disk_skipped_tokens",
    ),
    Metric(
        "slipstream_disk_pending_chunks",
        "gauge",
        "Pieces of prefixes that wait to be written to files.",
        field="disk_pending_chunks",
    ),
    Metric(
        "slipstream_disk_failures",
        "counter",
        "Pieces of prefixes that could not be written to files, or were not whole when they were read.",
        field="disk_failures",
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
