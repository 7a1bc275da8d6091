"""Every metric this server exports: its name, its help text, its labels. One place, so that docs and tests can read it.

Counters are named here without `_total`; the client library adds it. Units are seconds and ratios, never percentages.
"""

from __future__ import annotations

from service.metrics import control, host_memory, replicas, speculation, transfers
from service.metrics.histograms import HISTOGRAMS
from service.metrics.metric import Metric

PREFIX = "slipstream"

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
COMPUTED_TOKENS = Metric(
    "slipstream_computed_tokens", "counter", "Tokens that went through the model, by prefill and decode.", ("kind",)
)
PHASE_SECONDS = Metric(
    "slipstream_scheduler_phase_seconds",
    "counter",
    "Seconds that the scheduler spent in each phase of its steps; without overlap, submit is the step itself.",
    ("phase",),
)
KV_CACHE_USAGE = Metric(
    "slipstream_kv_cache_usage_ratio",
    "gauge",
    "Share of the fullest memory pool (all but request rows) held by live requests, 0 to 1.",
)
CACHE_CONFIG_INFO = Metric(
    "slipstream_cache_config_info",
    "gauge",
    "Always 1; the labels are the page size in tokens and the pages of the KV pool, by the names that gateways read.",
    ("block_size", "num_gpu_blocks"),
)
BUILD_INFO = Metric(
    "slipstream_build_info",
    "gauge",
    "Always 1; the labels say what is running.",
    ("version", "model", "dtype", "architecture", "quantization"),
)
CONFIG_INFO = Metric(
    "slipstream_config_info",
    "gauge",
    "Always 1; the labels are settings that explain the other figures.",
    (
        *("device", "overlap", "page_size", "max_running_requests", "max_queued_requests", "chunked_prefill_size"),
        *("mixed_chunk", "schedule_policy", "prefix_cache", "frontends", "kv_cache_dtype", "deterministic"),
    ),
)
WAITING_LIMIT = Metric("slipstream_requests_waiting_limit", "gauge", "Most requests that may wait for the batch.")
STARTUP_SECONDS = Metric("slipstream_startup_seconds", "gauge", "From the server's start to readiness; 0 until then.")
DRAIN_SECONDS = Metric("slipstream_drain_seconds", "gauge", "Seconds since the drain began; 0 while there is none.")
DRAIN_LIMIT_SECONDS = Metric(
    "slipstream_drain_limit_seconds", "gauge", "Seconds after which a drain should be over: linger, grace and a margin."
)
FRONTENDS_RUNNING = Metric(
    "slipstream_frontends_running",
    "gauge",
    "Front-end processes that are connected; 0 if one process does all.",
)
FRONTEND_RESTARTS = Metric(
    "slipstream_frontend_restarts", "counter", "Front-end processes that died and were started again."
)
MEMORY_SHARE = Metric(
    "slipstream_memory_used_ratio",
    "gauge",
    "Share of the container's memory, or else of the machine's, that is in use, 0 to 1; above 0.9 new requests are "
    "refused.",
)
READY = Metric("slipstream_ready", "gauge", "1 while the server is ready to admit requests, else 0.")
DRAINING = Metric("slipstream_draining", "gauge", "1 while the server drains before it exits, else 0.")

SNAPSHOT: tuple[Metric, ...] = (
    Metric("slipstream_requests_running", "gauge", "Requests in the batch.", field="running"),
    Metric("slipstream_requests_waiting", "gauge", "Requests that wait for a place in the batch.", field="waiting"),
    Metric(
        "slipstream_leased_pages",
        "gauge",
        "KV pages that no request holds and a transfer in flight still touches; free when it is over.",
        field="leased_pages",
    ),
    *host_memory.METRICS,
    Metric("slipstream_prompt_tokens", "counter", "Prompt tokens of admitted requests.", field="prompt_tokens"),
    Metric("slipstream_cached_tokens", "counter", "Prompt tokens served from the prefix cache.", field="cached_tokens"),
    Metric(
        "slipstream_generation_tokens",
        "counter",
        "Tokens generated; those behind a stop string too, which no usage counts: they were on their way when it came.",
        field="generation_tokens",
    ),
    Metric(
        "slipstream_preemptions",
        "counter",
        "Requests put back in the queue: for want of pages, for one of a higher class, for one of a tenant that held "
        "less, or because a failed one had computed what they read.",
        field="preemptions",
    ),
    Metric(
        "slipstream_priority_preemptions",
        "counter",
        "Of these, the ones in favour of a request of a higher class.",
        field="priority_preemptions",
    ),
    Metric(
        "slipstream_share_preemptions",
        "counter",
        "Of these, the ones in favour of a tenant that held less of rows and KV pages.",
        field="share_preemptions",
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
    Metric(
        "slipstream_split_steps",
        "counter",
        "Steps whose rows were sampled a few at a time, for want of memory.",
        field="split_steps",
    ),
    Metric(
        "slipstream_text_failures",
        "counter",
        "Requests on which the tokenizer failed, on their input or on their output.",
        field="text_failures",
    ),
    Metric("slipstream_chats", "counter", "Conversations that the chat template made prompts of.", field="chats"),
    Metric(
        "slipstream_chat_refusals",
        "counter",
        "Conversations that the chat template refused or failed on; the log says where it fails.",
        field="chat_refusals",
    ),
    Metric("slipstream_images", "counter", "Images in prompts.", field="images"),
    Metric("slipstream_image_tokens", "counter", "Prompt tokens that stand for images.", field="image_tokens"),
    Metric("slipstream_sounds", "counter", "Sounds that became prompts.", field="sounds"),
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
    Metric(
        "slipstream_device_busy_seconds",
        "counter",
        "Seconds in which the device computed steps.",
        field="device_busy_seconds",
    ),
    Metric(
        "slipstream_device_idle_seconds",
        "counter",
        "Seconds in which the device waited between two steps although there were requests.",
        field="device_idle_seconds",
    ),
)
"""Metrics that are one number of the engine's snapshot."""

RPC_STARTED = Metric("slipstream_rpc_started", "counter", "Calls that reached a handler.", ("method",))
RPC_HANDLED = Metric("slipstream_rpc_handled", "counter", "Calls that ended, by gRPC code.", ("method", "code"))
REJECTED = Metric(
    "slipstream_requests_rejected",
    "counter",
    "Generate, Embed, Classify and Score calls refused before they were queued.",
    ("reason",),
)
TURNED_AWAY = Metric(
    "slipstream_calls_turned_away",
    "counter",
    "Calls refused before their message was read, by what they take (health, facts, text, stream, work).",
    ("kind", "reason"),
)
SLOW_CONSUMERS = Metric(
    "slipstream_slow_consumer_evictions", "counter", "Streams ended because the client did not read fast enough."
)
RELOAD_FAILED = Metric(
    "slipstream_reload_failed",
    "gauge",
    "1 while a file that changed cannot be used: tokens that it is not seen to hold are refused, limits and "
    "certificates stay.",
    ("file",),
)
CERTIFICATE_EXPIRY = Metric(
    "slipstream_certificate_expiry_seconds",
    "gauge",
    "Seconds until the first of the served chain, or of the clients' authorities, ends; below 0 after that.",
    ("certificate",),
)
CALLERS_REFUSED = Metric(
    "slipstream_callers_refused",
    "counter",
    "Calls refused because of who called: no valid token or certificate, or no permission.",
    ("reason",),
)
TENANT_REFUSALS = Metric(
    "slipstream_tenant_refusals",
    "counter",
    "Calls refused by a tenant's own limit; tenants that the tenants file does not list are one, `other`.",
    ("tenant", "reason"),
)
TENANT_TOKENS = Metric(
    "slipstream_tenant_tokens",
    "counter",
    "Tokens of requests that ended, by tenant as in the tenants file (all others are `other`): prompt or generated.",
    ("tenant", "kind"),
)
KEPT_STREAMS = Metric("slipstream_kept_streams", "gauge", "Resumable streams that are kept for Attach, live or over.")
KEPT_BYTES = Metric("slipstream_kept_stream_bytes", "gauge", "Bytes that they take, told and unread.")
KEPT_GONE = Metric(
    "slipstream_kept_streams_gone",
    "counter",
    "Kept streams that expired or were evicted, or ended because too much was unread (stalled), and times that the "
    "beginning of one was given up (trimmed).",
    ("how",),
)
ATTACHES = Metric(
    "slipstream_attaches", "counter", "Attach calls, by how they began: attached, or the refusal.", ("how",)
)

PROCESS: tuple[Metric, ...] = (
    Metric("slipstream_process_start_time_seconds", "gauge", "Unix time at which the process began."),
    Metric("slipstream_process_cpu_seconds", "counter", "Seconds of user and system time."),
    Metric("slipstream_process_resident_memory_bytes", "gauge", "Resident memory."),
    Metric("slipstream_process_virtual_memory_bytes", "gauge", "Virtual memory."),
    Metric("slipstream_process_open_fds", "gauge", "Open file descriptors."),
    Metric("slipstream_process_max_fds", "gauge", "Most file descriptors that the process may open."),
)
"""Metrics of the process that serves metrics, which is the engine's; the client library reads them from /proc."""

ALL: tuple[Metric, ...] = (
    POOL_CAPACITY,
    POOL_USED,
    POOL_CACHED,
    KV_CACHE_USAGE,
    CACHE_CONFIG_INFO,
    *SNAPSHOT,
    control.ACTIVITY,
    control.WEIGHTS_INFO,
    *control.SINGLES,
    *speculation.SINGLES,
    *speculation.BY_POSITION,
    speculation.ACCEPTANCE_LENGTH,
    *transfers.SINGLES,
    transfers.FAILURES,
    *replicas.BY_REPLICA,
    WAITING_LIMIT,
    COMPUTED_TOKENS,
    PHASE_SECONDS,
    *HISTOGRAMS.values(),
    REQUESTS_FINISHED,
    ASSERT_FAILURES,
    RPC_STARTED,
    RPC_HANDLED,
    REJECTED,
    TURNED_AWAY,
    SLOW_CONSUMERS,
    RELOAD_FAILED,
    CERTIFICATE_EXPIRY,
    CALLERS_REFUSED,
    TENANT_REFUSALS,
    TENANT_TOKENS,
    KEPT_STREAMS,
    KEPT_BYTES,
    KEPT_GONE,
    ATTACHES,
    FRONTENDS_RUNNING,
    FRONTEND_RESTARTS,
    MEMORY_SHARE,
    READY,
    STARTUP_SECONDS,
    DRAINING,
    DRAIN_SECONDS,
    DRAIN_LIMIT_SECONDS,
    BUILD_INFO,
    CONFIG_INFO,
    *PROCESS,
)
