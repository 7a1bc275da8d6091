"""The part of the server's settings that the engine runs with: one frozen configuration per floor of core."""

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


def engine_config(settings: ServerConfig, model_path: str, bundled_name: str) -> EngineConfig:
    """Of `settings`, for the checkpoint at `model_path`. Raises ConfigError."""
    return EngineConfig(
        model=ModelConfig(
            path=model_path,
            dtype=settings.dtype,
            context_length=settings.context_length,
            served_name=settings.served_model_name or (None if settings.model else bundled_name),
            quantized_weights=settings.quantized_weights,
            native=settings.native,
        ),
        memory=MemoryConfig(
            page_size=settings.page_size,
            max_running_requests=settings.max_running_requests,
            max_total_tokens=settings.max_total_tokens,
            prefix_cache=settings.prefix_cache,
            max_state_slots=settings.max_state_slots,
            state_track_interval=settings.state_track_interval,
            sliding_window_pool=settings.sliding_window_pool,
            max_window_tokens=settings.max_window_tokens,
        ),
        scheduler=SchedulerConfig(
            chunked_prefill_size=settings.chunked_prefill_size,
            mixed_chunk=settings.mixed_chunk,
            policy=settings.schedule_policy,
            max_queued_requests=settings.max_queued_requests,
            default_queue_timeout=settings.queue_timeout,
        ),
        executor=ExecutorConfig(
            device=settings.device,
            overlap=settings.overlap,
            assert_mode=settings.assert_mode,
            cpu_threads=settings.cpu_threads,
            hang_timeout=settings.hang_timeout,
            attention_backend=settings.attention_backend,
            cuda_graphs=settings.cuda_graphs,
        ),
        lora=LoraConfig(settings.adapter or (), settings.max_lora_rank, settings.lora_dir, settings.max_lora_bytes),
        grammar=GrammarConfig(settings.grammar_backend, settings.grammar_compile_timeout, settings.grammar_cache_bytes),
        seed=settings.seed,
        max_pending_tokens=settings.max_pending_tokens,
    )
