"""One frozen configuration per floor; `EngineConfig` composes them. Validated once, at construction."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from core.errors import ConfigError
from core.machine import usable_cpus

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16")
QUANTIZATIONS = ("none", "int8")
QUANTIZED_WEIGHTS = ("compressed", "dense")
GRAMMAR_BACKENDS = ("auto", "llguidance", "xgrammar", "none")
NATIVE = ("auto", "wait", "off")
PREFIX_CACHES = ("radix", "none")
SCHEDULE_POLICIES = ("fcfs", "lpm", "priority")
PREFILLS_PER_DECODE = 4
"""Steps of prompt chunks in a row that rows ready to decode wait at most, where steps are not mixed."""
ASSERT_MODES = ("off", "count", "trap")
ADAPTER_NAME = re.compile(r"[A-Za-z0-9._:/-]{1,128}")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}; got {value!r}")


def _at_least(name: str, value: float | None, low: float) -> None:
    if value is not None and not value >= low:
        raise ConfigError(f"{name} must be at least {low:g}; got {value!r}")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which checkpoint, and how it is held. `context_length=None` takes the checkpoint's own."""

    path: str
    dtype: str = "auto"
    context_length: int | None = None
    served_name: str | None = None
    quantization: str = "none"
    """Of plain weights, while they are loaded: int8 with a scale per output, by torchao."""
    quantized_weights: str = "compressed"
    """Of compressed-tensors checkpoints: kept packed and unpacked by every call, or dense from load on."""
    native: str = "auto"
    """Compiled code for dense decoders on the CPU: `auto` compiles it beside serving where it is not cached yet, `wait`
    before serving, `off` leaves everything to transformers."""

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("native", self.native, NATIVE)
        _one_of("quantization", self.quantization, QUANTIZATIONS)
        _one_of("quantized_weights", self.quantized_weights, QUANTIZED_WEIGHTS)
        _at_least("context_length", self.context_length, 2)


@dataclass(frozen=True, slots=True)
class MemoryConfig:
    """Pool sizes. `max_total_tokens=None` sizes the KV pool from the memory at hand."""

    page_size: int = 16
    max_running_requests: int = 256
    max_total_tokens: int | None = None
    prefix_cache: str = "radix"
    max_state_slots: int | None = None
    """Recurrent states held at once, of requests and for cached pages, for models that have any; None: two per request
    row, or one without a prefix cache."""
    state_track_interval: int = 256
    """Every how many tokens, rounded up to pages, a decoding request's recurrent state is kept for the cache."""
    max_encoder_tokens: int | None = None
    """Encoder tokens whose keys and values are held at once, for encoder-decoders; None: as many as decoder tokens."""
    sliding_window_pool: bool = True
    """Whether sliding-window layers get a pool of their own, which holds only what is inside somebody's window."""
    max_window_tokens: int | None = None
    """Tokens that this pool holds; None: enough for the windows of all rows, as far as memory goes."""

    def __post_init__(self) -> None:
        _at_least("page_size", self.page_size, 1)
        _at_least("max_running_requests", self.max_running_requests, 1)
        _at_least("max_total_tokens", self.max_total_tokens, self.page_size)
        _at_least("max_state_slots", self.max_state_slots, 1)
        _at_least("state_track_interval", self.state_track_interval, 1)
        _at_least("max_encoder_tokens", self.max_encoder_tokens, self.page_size)
        _at_least("max_window_tokens", self.max_window_tokens, self.page_size)
        _one_of("prefix_cache", self.prefix_cache, PREFIX_CACHES)


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """How steps are planned. `chunked_prefill_size` bounds the prompt tokens of one step."""

    chunked_prefill_size: int = 512
    mixed_chunk: bool = True
    """Whether one step may hold prompt chunks and decodes; without it they take turns (`core/scheduler/turns.py`)."""
    policy: str = "fcfs"
    max_queued_requests: int = 1024
    default_queue_timeout: float | None = None
    priority_preemption: bool = True
    """Under the `priority` policy: whether a waiting request may take the place of a running one of a lower class."""
    priority_preemption_threshold: int = 1
    """The smallest difference in priority that justifies it."""

    def __post_init__(self) -> None:
        _at_least("chunked_prefill_size", self.chunked_prefill_size, 1)
        _at_least("max_queued_requests", self.max_queued_requests, 1)
        _at_least("priority_preemption_threshold", self.priority_preemption_threshold, 1)
        _one_of("schedule_policy", self.policy, SCHEDULE_POLICIES)


@dataclass(frozen=True, slots=True)
class ExecutorConfig:
    """Where and how steps run. `cpu_threads=None` leaves one core to the event loop."""

    device: str = "auto"
    overlap: bool = True
    assert_mode: str = "count"
    cpu_threads: int | None = None
    hang_timeout: float = 300.0
    attention_backend: str = "auto"
    """A name of `core.attention.registry`; `auto` takes the best one for the device."""
    cuda_graphs: bool = True
    """Whether decode steps are captured at start and replayed, on devices that can."""

    def __post_init__(self) -> None:
        _one_of("device", self.device, DEVICES)
        _one_of("assert_mode", self.assert_mode, ASSERT_MODES)
        _at_least("cpu_threads", self.cpu_threads, 1)

    def threads(self) -> int:
        """Threads for math on the CPU: as asked, else every core that this process may use but one."""
        return self.cpu_threads or max(1, usable_cpus() - 1)


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """LoRA adapters served beside the base model: (name, PEFT directory) each, all loaded at start; none by default.

    `directory` is the one below which others may be loaded while serving; None: none may. `max_bytes` bounds what all
    of them take on the device.
    """

    adapters: tuple[tuple[str, str], ...] = ()
    max_rank: int = 64
    directory: str | None = None
    max_bytes: int = 1 << 30

    def __post_init__(self) -> None:
        _at_least("max_lora_rank", self.max_rank, 1)
        _at_least("max_lora_bytes", self.max_bytes, 1)
        names = [name for name, _ in self.adapters]
        for name in names:
            if not ADAPTER_NAME.fullmatch(name):
                raise ConfigError(f"adapter: the name {name!r} must be 1 to 128 characters of A-Z a-z 0-9 . _ : / -")
            if names.count(name) > 1:
                raise ConfigError(f"adapter: the name {name!r} is given twice")

    @property
    def enabled(self) -> bool:
        """Whether there are adapters, or can be."""
        return bool(self.adapters) or self.directory is not None


@dataclass(frozen=True, slots=True)
class GrammarConfig:
    """How constraints of outputs are compiled. "auto" takes the first backend that is installed, if any.

    `compile_timeout` in seconds of one compile; `max_compiles` at once, each in a process of its own.
    """

    backend: str = "auto"
    compile_timeout: float = 3.0
    cache_bytes: int = 64 << 20
    max_compiles: int = 2

    def __post_init__(self) -> None:
        _one_of("grammar_backend", self.backend, GRAMMAR_BACKENDS)
        _at_least("grammar_compile_timeout", self.compile_timeout, 0.01)
        _at_least("grammar_cache_bytes", self.cache_bytes, 0)
        _at_least("max_compiles", self.max_compiles, 1)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything the engine needs. `max_pending_tokens` bounds what one slow reader may leave unread."""

    model: ModelConfig
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    executor: ExecutorConfig = field(default_factory=ExecutorConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    grammar: GrammarConfig = field(default_factory=GrammarConfig)
    seed: int | None = None
    max_pending_tokens: int = 8192
