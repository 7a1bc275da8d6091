"""The production engine over an emulated device whose every token is known (`service.bench.emulated`)."""

from __future__ import annotations

from typing import Any

from core.config import EngineConfig, ExecutorConfig, MemoryConfig, ModelConfig, SchedulerConfig
from core.engine.build import assemble
from core.engine.built_engine import BuiltEngine
from core.text.tokenizer import Tokenizer
from service.bench.emulated import EmulatedModel, EmulatedStreams, Timeline


def emulated_config(
    *, rows: int = 256, overlap: bool = True, directory: str = "emulated", **memory: Any
) -> EngineConfig:
    """Roomy limits and trapping checks; `memory` are fields of `MemoryConfig`.

    Gateways are given the files of a `directory` that exists.
    """
    return EngineConfig(
        model=ModelConfig(directory, served_name="emulated"),
        memory=MemoryConfig(max_running_requests=rows, **{"max_total_tokens": rows * 64, **memory}),
        scheduler=SchedulerConfig(chunked_prefill_size=1024, max_queued_requests=100_000),
        executor=ExecutorConfig(device="cpu", overlap=overlap, assert_mode="trap"),
    )


def emulated_engine(
    tokenizer: Tokenizer, *, step_seconds: float, rows: int = 256, context: int = 4096, **options: Any
) -> BuiltEngine:
    """Each step takes `step_seconds` of the device; `options` are those of `emulated_config`."""
    timeline = Timeline(step_seconds)
    model = EmulatedModel(timeline, tokenizer.vocab_size, context)
    return assemble(emulated_config(rows=rows, **options), model, tokenizer, EmulatedStreams(timeline))
