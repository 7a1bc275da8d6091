"""The engine's part of the server's settings, floor by floor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from core.config import (
    EngineConfig,
    ExecutorConfig,
    GrammarConfig,
    LoraConfig,
    MemoryConfig,
    ModelConfig,
    SchedulerConfig,
)

if TYPE_CHECKING:
    from service.config import ServerConfig

BUNDLED_NAME = "slipstream-bundled"


def engine_config(config: ServerConfig, model_path: str) -> EngineConfig:
    """For the checkpoint at `model_path`. Raises ConfigError."""
    return EngineConfig(
        model=ModelConfig(
            path=model_path,
            dtype=config.dtype,
            context_length=config.context_length,
            served_name=config.served_model_name or (None if config.model else BUNDLED_NAME),
            quantized_weights=config.quantized_weights,
            native=config.native,
        ),
        memory=MemoryConfig(
            page_size=config.page_size,
            max_running_requests=config.max_running_requests,
            max_total_tokens=config.max_total_tokens,
            prefix_cache=config.prefix_cache,
            max_state_slots=config.max_state_slots,
            state_track_interval=config.state_track_interval,
            sliding_window_pool=config.sliding_window_pool,
            max_window_tokens=config.max_window_tokens,
        ),
        scheduler=SchedulerConfig(
            chunked_prefill_size=config.chunked_prefill_size,
            mixed_chunk=config.mixed_chunk,
            policy=config.schedule_policy,
            max_queued_requests=config.max_queued_requests,
            default_queue_timeout=config.queue_timeout,
        ),
        executor=ExecutorConfig(
            device=config.device,
            overlap=config.overlap,
            assert_mode=config.assert_mode,
            cpu_threads=config.cpu_threads,
            hang_timeout=config.hang_timeout,
            attention_backend=config.attention_backend,
            cuda_graphs=config.cuda_graphs,
        ),
        lora=LoraConfig(config.adapter or (), config.max_lora_rank, config.lora_dir, config.max_lora_bytes),
        grammar=GrammarConfig(config.grammar_backend, config.grammar_compile_timeout, config.grammar_cache_bytes),
        seed=config.seed,
        max_pending_tokens=config.max_pending_tokens,
    )
