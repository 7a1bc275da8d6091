"""The engine's settings: which model, on what, with how much memory, in which order.

`service.config.server_config` adds the rest.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from core.config import (
    ASSERT_MODES,
    DEVICES,
    DTYPES,
    GRAMMAR_BACKENDS,
    NATIVE,
    PREFILLS_PER_DECODE,
    PREFIX_CACHES,
    QUANTIZATIONS,
    QUANTIZED_WEIGHTS,
    SCHEDULE_POLICIES,
    ExecutorConfig,
    GrammarConfig,
    LoraConfig,
    MemoryConfig,
    ModelConfig,
    SchedulerConfig,
)
from service.config.sources import setting


def default_of(floor: type[Any], name: str) -> Any:
    """The default that a floor of core gives the field, so that no default is written twice."""
    return next(field.default for field in dataclasses.fields(floor) if field.name == name)


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What the engine is made from; every field is a flag, as `service.config.server_config` says."""

    model: str | None = setting(
        None, str, "Model", "Checkpoint directory in Hugging Face format; unset: the bundled model.", metavar="DIR"
    )
    served_model_name: str | None = setting(
        None, str, "Model", "Name that clients see; unset: the directory's name, or slipstream-bundled."
    )
    dtype: str = setting(default_of(ModelConfig, "dtype"), str, "Model", "Type of weights and cache.", choices=DTYPES)
    quantization: str = setting(
        default_of(ModelConfig, "quantization"),
        str,
        "Model",
        "Quantise plain weights while they are loaded: int8 with a scale per output, or none.",
        choices=QUANTIZATIONS,
    )
    quantized_weights: str = setting(
        default_of(ModelConfig, "quantized_weights"),
        str,
        "Model",
        "Weights of compressed-tensors checkpoints: compressed (less memory) or dense (faster steps).",
        choices=QUANTIZED_WEIGHTS,
    )
    native: str = setting(
        default_of(ModelConfig, "native"),
        str,
        "Model",
        "Compiled code for dense models on the CPU: compile it beside serving (auto), before (wait), or never (off).",
        choices=NATIVE,
    )
    context_length: int | None = setting(
        None, int, "Model", "Most tokens of prompt and output together; unset: the checkpoint's own.", low=2
    )

    adapter: tuple[tuple[str, str], ...] | None = setting(
        None,
        tuple,
        "Model",
        "LoRA adapter in PEFT format, loaded at start and asked for by name; may be repeated (a list in the file, "
        "commas in the environment).",
        metavar="NAME=DIR",
    )
    max_lora_rank: int = setting(default_of(LoraConfig, "max_rank"), int, "Model", "Highest rank of an adapter.", low=1)
    lora_dir: str | None = setting(
        None,
        str,
        "Model",
        "Directory below which LoadAdapter may read adapters while serving; unset: none are loaded.",
        metavar="DIR",
    )
    max_lora_bytes: int = setting(
        default_of(LoraConfig, "max_bytes"),
        int,
        "Model",
        "Bytes that all adapters together may take on the device.",
        low=1,
    )

    device: str = setting(default_of(ExecutorConfig, "device"), str, "Device", "Where the model runs.", choices=DEVICES)
    overlap: bool = setting(
        default_of(ExecutorConfig, "overlap"), bool, "Device", "Plan step N+1 while the device computes step N."
    )
    cpu_threads: int | None = setting(
        None, int, "Device", "Threads for math on the CPU; unset: one less than the cores it may use.", low=1
    )
    assert_mode: str = setting(
        default_of(ExecutorConfig, "assert_mode"),
        str,
        "Device",
        "Device-side checks: count violations, trap on the first, or off.",
        choices=ASSERT_MODES,
    )
    attention_backend: str = setting(
        default_of(ExecutorConfig, "attention_backend"), str, "Device", "Attention backend."
    )
    cuda_graphs: bool = setting(
        default_of(ExecutorConfig, "cuda_graphs"), bool, "Device", "Capture decode steps as CUDA graphs at start."
    )
    hang_timeout: float = setting(
        default_of(ExecutorConfig, "hang_timeout"),
        float,
        "Device",
        "Seconds without progress before the engine is dead.",
        low=0,
    )

    page_size: int = setting(
        default_of(MemoryConfig, "page_size"), int, "Memory", "Tokens per page of the KV cache.", low=1
    )
    max_total_tokens: int | None = setting(
        None, int, "Memory", "Tokens that the KV cache holds; unset: sized from the memory at hand.", low=1
    )
    max_running_requests: int = setting(
        default_of(MemoryConfig, "max_running_requests"), int, "Memory", "Most requests in one batch.", low=1
    )
    prefix_cache: str = setting(
        default_of(MemoryConfig, "prefix_cache"),
        str,
        "Memory",
        "Reuse of common prompt prefixes.",
        choices=PREFIX_CACHES,
    )
    max_state_slots: int | None = setting(
        None,
        int,
        "Memory",
        "Recurrent states held at once, for models that have any; unset: two per request, one without prefix reuse.",
        low=1,
    )
    state_track_interval: int = setting(
        default_of(MemoryConfig, "state_track_interval"),
        int,
        "Memory",
        "Every how many output tokens a recurrent state is kept for reuse.",
        low=1,
    )
    sliding_window_pool: bool = setting(
        default_of(MemoryConfig, "sliding_window_pool"),
        bool,
        "Memory",
        "Hold sliding-window layers in a pool of their own that frees what left the window.",
    )
    max_window_tokens: int | None = setting(
        None, int, "Memory", "Tokens that this pool holds; unset: sized from requests and the memory at hand.", low=1
    )

    chunked_prefill_size: int = setting(
        default_of(SchedulerConfig, "chunked_prefill_size"), int, "Scheduling", "Most prompt tokens in one step.", low=1
    )
    mixed_chunk: bool = setting(
        default_of(SchedulerConfig, "mixed_chunk"),
        bool,
        "Scheduling",
        "Put prompt chunks and decoding into one batch; without it requests that decode wait at most "
        f"{PREFILLS_PER_DECODE} steps of chunks.",
    )
    schedule_policy: str = setting(
        default_of(SchedulerConfig, "policy"),
        str,
        "Scheduling",
        "Who is admitted first: arrival, longest cached prefix, or lowest priority value.",
        choices=SCHEDULE_POLICIES,
    )
    priority_preemption: bool = setting(
        default_of(SchedulerConfig, "priority_preemption"),
        bool,
        "Scheduling",
        "Under the priority policy, put a running request back in the queue for a waiting one of a lower value.",
    )
    priority_preemption_threshold: int = setting(
        default_of(SchedulerConfig, "priority_preemption_threshold"),
        int,
        "Scheduling",
        "Smallest difference in priority that justifies it.",
        low=1,
    )
    max_queued_requests: int = setting(
        default_of(SchedulerConfig, "max_queued_requests"),
        int,
        "Scheduling",
        "Most requests waiting for the batch.",
        low=1,
    )
    queue_timeout: float | None = setting(
        None, float, "Scheduling", "Seconds a request may wait if it does not say; unset: no limit.", low=0
    )
    seed: int | None = setting(None, int, "Scheduling", "Seed for requests that give none; unset: random.", low=0)

    grammar_backend: str = setting(
        default_of(GrammarConfig, "backend"),
        str,
        "Constraints",
        "Library that constraints of outputs are compiled with; auto takes the first that is installed.",
        choices=GRAMMAR_BACKENDS,
    )
    grammar_compile_timeout: float = setting(
        default_of(GrammarConfig, "compile_timeout"),
        float,
        "Constraints",
        "Seconds after which a constraint is refused as too complex.",
        low=0.01,
    )
    grammar_cache_bytes: int = setting(
        default_of(GrammarConfig, "cache_bytes"),
        int,
        "Constraints",
        "Bytes that compiled constraints may take while no request uses them.",
        low=0,
    )
