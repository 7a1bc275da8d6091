"""Every metric this server exports: its name, its help text, its labels. One place, so that docs and tests can read it.

Counters are named here without `_total`; the client library adds it. Units are seconds and ratios, never percentages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PREFIX = "slipstream_"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. `field` names the `EngineStats` attribute it shows, empty if it is derived or kept by the service."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    field: str = ""

    @property
    def exported(self) -> str:
        """The name as scraped."""
        return self.name + ("_total" if self.kind == "counter" else "")


POOL_CAPACITY = Metric("slipstream_pool_capacity", "gauge", "Units in the pool, in rows or pages.", ("pool",))
POOL_USED = Metric("slipstream_pool_used", "gauge", "Units of the pool held by live requests.", ("pool",))
POOL_CACHED = Metric(
    "slipstream_pool_cached", "gauge", "Units of the pool that hold only evictable cached prefixes.", ("pool",)
)
ASSERT_FAILURES = Metric(
    "slipstream_assert_failures",
    "counter",
    "Violated invariants, host and device; anything above zero is a bug in this server.",
    ("check",),
)
REQUESTS_FINISHED = Metric(
    "slipstream_requests_finished", "counter", "Requests that left the engine, by how they ended.", ("reason",)
)
KV_CACHE_USAGE = Metric(
    "slipstream_kv_cache_usage_ratio", "gauge", "Share of the KV pool held by live requests, 0 to 1."
)
BUILD_INFO = Metric(
    "slipstream_build_info", "gauge", "Always 1; the labels say what is running.", ("version", "model", "dtype")
)
READY = Metric("slipstream_ready", "gauge", "1 while the server is ready to admit requests, else 0.")
DRAINING = Metric("slipstream_draining", "gauge", "1 while the server drains before it exits, else 0.")

SNAPSHOT: tuple[Metric, ...] = (
    Metric("slipstream_requests_running", "gauge", "Requests in the batch.", field="running"),
    Metric("slipstream_requests_waiting", "gauge", "Requests that wait for a place in the batch.", field="waiting"),
    Metric("slipstream_prompt_tokens", "counter", "Prompt tokens of admitted requests.", field="prompt_tokens"),
    Metric("slipstream_cached_tokens", "counter", "Prompt tokens served from the prefix cache.", field="cached_tokens"),
    Metric("slipstream_generation_tokens", "counter", "Tokens generated.", field="generation_tokens"),
    Metric(
        "slipstream_preemptions",
        "counter",
        "Requests put back in the queue for want of pages.",
        field="preemptions",
    ),
    Metric(
        "slipstream_recomputed_tokens",
        "counter",
        "Tokens that preempted requests had to compute again.",
        field="recomputed_tokens",
    ),
    Metric("slipstream_steps", "counter", "Forward steps taken.", field="step"),
    Metric(
        "slipstream_stale_results",
        "counter",
        "Results dropped because their row had changed owner in the meantime.",
        field="stale_results",
    ),
    Metric("slipstream_adapters_loaded", "gauge", "LoRA adapters that hold memory.", field="adapters_loaded"),
    Metric("slipstream_adapter_bytes", "gauge", "Bytes that LoRA adapters take on the device.", field="adapter_bytes"),
    Metric(
        "slipstream_adapter_evictions",
        "counter",
        "LoRA adapters unloaded to make room for others.",
        field="adapter_evictions",
    ),
    Metric(
        "slipstream_adapter_load_failures",
        "counter",
        "Loads of LoRA adapters that were refused.",
        field="adapter_load_failures",
    ),
    Metric("slipstream_grammars_cached", "gauge", "Compiled constraints that are kept.", field="grammars_cached"),
    Metric(
        "slipstream_grammar_cache_bytes",
        "gauge",
        "Bytes that they are taken to need.",
        field="grammar_cache_bytes",
    ),
    Metric(
        "slipstream_grammar_cache_hits",
        "counter",
        "Constraints that were compiled already when they were asked for.",
        field="grammar_cache_hits",
    ),
    Metric(
        "slipstream_grammar_cache_evictions",
        "counter",
        "Compiled constraints given up to make room for others.",
        field="grammar_cache_evictions",
    ),
    Metric(
        "slipstream_grammar_compile_failures",
        "counter",
        "Constraints that could not be compiled, or not within the bounds.",
        field="grammar_compile_failures",
    ),
    Metric(
        "slipstream_device_idle_ratio",
        "gauge",
        "Share of recent time in which the device had nothing to do, 0 to 1.",
        field="device_idle_ratio",
    ),
)
"""Metrics that are one number of the snapshot."""

HISTOGRAMS: dict[str, Metric] = {
    metric.field: metric
    for metric in (
        Metric(
            "slipstream_time_to_first_token_seconds",
            "histogram",
            "From a request's arrival to its first token.",
            field="time_to_first_token_seconds",
        ),
        Metric(
            "slipstream_inter_token_latency_seconds",
            "histogram",
            "Between two tokens of one output.",
            field="inter_token_latency_seconds",
        ),
        Metric(
            "slipstream_queue_time_seconds",
            "histogram",
            "From a request's arrival to its first forward step.",
            field="queue_time_seconds",
        ),
        Metric(
            "slipstream_e2e_request_latency_seconds",
            "histogram",
            "From a request's arrival to its end.",
            field="e2e_request_latency_seconds",
        ),
        Metric(
            "slipstream_adapter_load_seconds",
            "histogram",
            "From a call that loads a LoRA adapter to its first possible use.",
            field="adapter_load_seconds",
        ),
        Metric(
            "slipstream_grammar_compile_seconds",
            "histogram",
            "Of a constraint's compile, the wait for its turn included.",
            field="grammar_compile_seconds",
        ),
        Metric(
            "slipstream_embedding_latency_seconds",
            "histogram",
            "From an Embed call's arrival to the vector of one of its inputs.",
            field="embedding_latency_seconds",
        ),
    )
}
"""Histograms of the snapshot, by their key in `EngineStats.histograms`."""

RPC_STARTED = Metric("slipstream_rpc_started", "counter", "Calls that reached a handler.", ("method",))
RPC_HANDLED = Metric("slipstream_rpc_handled", "counter", "Calls that ended, by gRPC code.", ("method", "code"))
REJECTED = Metric(
    "slipstream_requests_rejected", "counter", "Generate and Embed calls refused before they were queued.", ("reason",)
)
SLOW_CONSUMERS = Metric(
    "slipstream_slow_consumer_evictions", "counter", "Streams ended because the client did not read fast enough."
)
TENANT_REFUSALS = Metric(
    "slipstream_tenant_refusals",
    "counter",
    "Calls refused by a tenant's own limit; tenants that the tenants file does not list are one, `other`.",
    ("tenant", "reason"),
)
KEPT_STREAMS = Metric("slipstream_kept_streams", "gauge", "Resumable streams that are kept for Attach, live or over.")
KEPT_BYTES = Metric("slipstream_kept_stream_bytes", "gauge", "Bytes that they take.")
KEPT_GONE = Metric(
    "slipstream_kept_streams_gone",
    "counter",
    "Kept streams that expired or were evicted, and times that the beginning of one was given up (trimmed).",
    ("how",),
)
ATTACHES = Metric(
    "slipstream_attaches", "counter", "Attach calls, by how they began: attached, or the refusal.", ("how",)
)

ALL: tuple[Metric, ...] = (
    POOL_CAPACITY,
    POOL_USED,
    POOL_CACHED,
    KV_CACHE_USAGE,
    *SNAPSHOT,
    *HISTOGRAMS.values(),
    REQUESTS_FINISHED,
    ASSERT_FAILURES,
    RPC_STARTED,
    RPC_HANDLED,
    REJECTED,
    SLOW_CONSUMERS,
    TENANT_REFUSALS,
    KEPT_STREAMS,
    KEPT_BYTES,
    KEPT_GONE,
    ATTACHES,
    READY,
    DRAINING,
    BUILD_INFO,
)
