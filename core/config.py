"""One frozen configuration per floor; `EngineConfig` composes them. Validated once, at construction.

A field that a user may set says so itself (`core.setting`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from core.disagg_config import DisaggConfig as DisaggConfig
from core.errors import ConfigError
from core.machine import usable_cpus
from core.model_config import ModelConfig as ModelConfig
from core.nodes_config import NodesConfig as NodesConfig
from core.setting import at_least, check_settings, setting

DEVICES = ("auto", "cpu", "cuda")
GRAMMAR_BACKENDS = ("auto", "llguidance", "xgrammar", "none")
SPECULATIVE = ("auto", "off", "ngram", "eagle", "eagle:DIR", "draft:DIR", "mtp")
"""DIR stands for a directory."""
PREFIX_CACHES = ("radix", "none")
SCHEDULE_POLICIES = ("fcfs", "lpm", "priority")
PROMPT_TOKENS = 512
"""Most prompt tokens in one step of a CPU, unless it is configured."""
PREFILLS_PER_DECODE = 4
"""Steps of prompt chunks in a row that rows ready to decode wait at most, where steps are not mixed."""
ASSERT_MODES = ("off", "count", "trap")
ADAPTER_NAME = re.compile(r"[A-Za-z0-9._:/-]{1,128}")


@dataclass(frozen=True, slots=True)
class MemoryConfig:
    """Pool sizes. `max_total_tokens=None` sizes the KV pool from the memory at hand."""

    page_size: int = setting(16, "Memory", "Tokens per page of the KV cache.", low=1)
    max_running_requests: int = setting(256, "Memory", "Most requests in one batch.", low=1)
    max_total_tokens: int | None = setting(
        None, "Memory", "Tokens that the KV cache holds; unset: sized from the memory at hand.", low=1
    )
    prefix_cache: str = setting("radix", "Memory", "Reuse of common prompt prefixes.", choices=PREFIX_CACHES)
    max_state_slots: int | None = setting(
        None,
        "Memory",
        "Recurrent states held at once, for models that have any; unset: two per request, one without prefix reuse.",
        low=1,
    )
    state_track_interval: int = setting(
        256, "Memory", "Every how many output tokens a recurrent state is kept for reuse.", low=1
    )
    """Rounded up to pages."""
    max_encoder_tokens: int | None = setting(
        None,
        "Memory",
        "Encoder tokens whose keys and values are held at once, for encoder-decoders; unset: as many as the KV cache.",
        low=1,
    )
    host_cache_bytes: int = setting(
        0,
        "Memory",
        "Bytes of host memory for keys and values: of prefixes that the device gives up, and of retracted requests,"
        " which then go on without a prefill (not with speculation). With speculation it is unused for models with"
        " recurrent states or window pools; for encoders it always is.",
        low=0,
    )
    host_cache_chunk: int = setting(
        256,
        "Memory",
        "Tokens of the pieces in which prefixes are kept there; a shorter rest is kept of models with states or"
        " window pools alone.",
        low=1,
    )
    """Rounded up to pages."""
    disk_cache: str | None = setting(
        None,
        "Memory",
        "Directory in which prefixes are kept beyond host memory and beyond this process; unset: none are."
        " Needs host memory (1 GiB unless host_cache_bytes is set).",
        metavar="DIR",
    )
    disk_cache_bytes: int = setting(64 << 30, "Memory", "Bytes that its files may take.", low=1 << 20)
    sliding_window_pool: bool = setting(
        True, "Memory", "Hold sliding-window layers in a pool of their own that frees what left the window."
    )
    max_window_tokens: int | None = setting(
        None, "Memory", "Tokens that this pool holds; unset: sized from requests and the memory at hand.", low=1
    )
    machine_share: float = 1.0
    """Share of the machine's free memory that this engine counts on; less than 1 beside other engines on a CPU."""

    def __post_init__(self) -> None:
        check_settings(self)
        # A pool holds at least one page.
        at_least("max_total_tokens", self.max_total_tokens, self.page_size)
        at_least("max_encoder_tokens", self.max_encoder_tokens, self.page_size)
        at_least("max_window_tokens", self.max_window_tokens, self.page_size)


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """How steps are planned. `chunked_prefill_size=None` sizes steps by the memory of the device."""

    chunked_prefill_size: int | None = setting(
        None,
        "Scheduling",
        f"Most prompt tokens in one step; unset: {PROMPT_TOKENS} on a CPU (small encoders up to 2048), 2048 to 8192 by "
        "the memory of a GPU.",
        low=1,
    )
    mixed_chunk: bool = setting(
        True,
        "Scheduling",
        "Put prompt chunks and decoding into one batch; without it requests that decode wait at most "
        f"{PREFILLS_PER_DECODE} steps of chunks.",
    )
    """Without it prompt chunks and decodes take turns (`core/scheduler/turns.py`)."""
    policy: str = setting(
        "fcfs",
        "Scheduling",
        "Who is admitted first: arrival, longest cached prefix, or lowest priority value.",
        flag="schedule_policy",
        choices=SCHEDULE_POLICIES,
    )
    max_queued_requests: int = setting(1024, "Scheduling", "Most requests waiting for the batch.", low=1)
    default_queue_timeout: float | None = setting(
        None,
        "Scheduling",
        "Seconds a request may wait if it does not say; unset: no limit.",
        flag="queue_timeout",
        low=0,
    )
    priority_preemption: bool = setting(
        True,
        "Scheduling",
        "Under the priority policy, put a running request back in the queue for a waiting one of a lower value.",
    )
    priority_preemption_threshold: int = setting(
        1, "Scheduling", "Smallest difference in priority that justifies it.", low=1
    )

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def prompt_tokens(self) -> int:
        """Most prompt tokens in one step: `chunked_prefill_size`, else what a CPU gets."""
        return self.chunked_prefill_size or PROMPT_TOKENS


@dataclass(frozen=True, slots=True)
class ExecutorConfig:
    """Where and how steps run. `cpu_threads=None` leaves one core to the event loop, but for encoders."""

    device: str = setting("auto", "Device", "Where the model runs.", choices=DEVICES)
    overlap: bool = setting(True, "Device", "Plan step N+1 while the device computes step N.")
    assert_mode: str = setting(
        "count",
        "Device",
        "Device-side checks: count violations, trap on the first, or off.",
        choices=ASSERT_MODES,
    )
    cpu_threads: int | None = setting(
        None,
        "Device",
        "Threads for math on the CPU; unset: one less than the cores it may use, and all of them for encoders.",
        low=1,
    )
    hang_timeout: float = setting(300.0, "Device", "Seconds without progress before the engine is dead.", low=0)
    attention_backend: str = setting("auto", "Device", "Attention backend.")
    """A name of `core.attention.registry`; `auto` takes the best one for the device."""
    cuda_graphs: bool = setting(True, "Device", "Capture decode steps and short prompts as CUDA graphs at start.")

    def __post_init__(self) -> None:
        check_settings(self)

    def threads(self) -> int:
        """Threads for math on the CPU: as asked, else every core that this process may use but one."""
        return self.cpu_threads or max(1, usable_cpus() - 1)


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """How tokens are guessed ahead, so that one step puts out several. Outputs are the same with and without."""

    method: str = setting(
        "off",
        "Speculation",
        "What drafts tokens ahead of the model: ngram (what followed the same words before), draft:DIR (a smaller "
        "model of the same vocabulary), eagle (a trained head, as the bundled model has), eagle:DIR (an EAGLE-3 head "
        "for another model), mtp (the heads that a checkpoint of DeepSeek-V3 or GLM-4-MoE brings along), off, "
        "or auto (ngram where the model and the device can verify drafts).",
        flag="speculative",
        metavar="METHOD",
    )
    max_drafts: int = setting(
        6, "Speculation", "Most drafts for one token; fewer where that is faster.", flag="speculative_drafts", low=1
    )
    index_bytes: int = setting(
        32 << 20,
        "Speculation",
        "Bytes in which ngram notes what was said, oldest forgotten first; tenants see only their own.",
        flag="speculative_index_bytes",
        low=1 << 16,
    )

    def __post_init__(self) -> None:
        check_settings(self)
        name, colon, folder = self.method.partition(":")
        if (f"{name}:DIR" if colon else name) not in SPECULATIVE or bool(colon) != bool(folder):
            wanted = ", ".join(SPECULATIVE)
            raise ConfigError(f"speculative must be one of {wanted}; got {self.method!r}")


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """LoRA adapters served beside the base model: (name, PEFT directory) each, all loaded at start; none by default.

    `directory` is the one below which others may be loaded while serving; None: none may. `max_bytes` bounds what all
    of them take on the device.
    """

    adapters: tuple[tuple[str, str], ...] = setting(
        (),
        "Model",
        "LoRA adapter in PEFT format, loaded at start and asked for by name; may be repeated (a list in the file, "
        "commas in the environment).",
        flag="adapter",
        metavar="NAME=DIR",
    )
    max_rank: int = setting(64, "Model", "Highest rank of an adapter.", flag="max_lora_rank", low=1)
    directory: str | None = setting(
        None,
        "Model",
        "Directory below which LoadAdapter may read adapters while serving; unset: none are loaded.",
        flag="lora_dir",
        metavar="DIR",
    )
    max_bytes: int = setting(
        1 << 30, "Model", "Bytes that all adapters together may take on the device.", flag="max_lora_bytes", low=1
    )

    def __post_init__(self) -> None:
        check_settings(self)
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

    backend: str = setting(
        "auto",
        "Constraints",
        "Library that constraints of outputs are compiled with; auto takes the first that is installed.",
        flag="grammar_backend",
        choices=GRAMMAR_BACKENDS,
    )
    compile_timeout: float = setting(
        3.0,
        "Constraints",
        "Seconds after which a constraint is refused as too complex.",
        flag="grammar_compile_timeout",
        low=0.01,
    )
    cache_bytes: int = setting(
        64 << 20,
        "Constraints",
        "Bytes that compiled constraints may take while no request uses them.",
        flag="grammar_cache_bytes",
        low=0,
    )
    max_compiles: int = 2

    def __post_init__(self) -> None:
        check_settings(self)
        at_least("max_compiles", self.max_compiles, 1)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything the engine needs. `max_pending_tokens` bounds what one slow reader may leave unread."""

    model: ModelConfig = field(default_factory=ModelConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    executor: ExecutorConfig = field(default_factory=ExecutorConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    grammar: GrammarConfig = field(default_factory=GrammarConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    disagg: DisaggConfig = field(default_factory=DisaggConfig)
    nodes: NodesConfig = field(default_factory=NodesConfig)
    seed: int | None = setting(None, "Scheduling", "Seed for requests that give none; unset: random.", low=0)
    max_pending_tokens: int = setting(8192, "Limits", "Most unread tokens of one stream.", low=1)

    def __post_init__(self) -> None:
        check_settings(self)
        self.nodes.ranks_here(self.model.ranks)
