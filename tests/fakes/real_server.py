"""The production server over a real socket, around a real checkpoint or an emulated device."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from core.config import EngineConfig, ExecutorConfig, MemoryConfig, ModelConfig, SchedulerConfig
from core.engine.async_engine import AsyncEngine
from core.engine.build import assemble
from core.text.tokenizer import Tokenizer
from service.bench.emulated import EmulatedModel, EmulatedStreams, Timeline
from service.client import SlipstreamClient
from service.config.server_config import ServerConfig
from service.engine.builder import EngineBuilder, build_core_engine
from service.server.server import Server


@asynccontextmanager
async def serve_checkpoint(
    directory: Path, build: EngineBuilder = build_core_engine, **settings: Any
) -> AsyncIterator[tuple[Server, SlipstreamClient]]:
    """A loaded server on a free port and a client of it; everything is closed at the end.

    Math runs on one thread, device checks trap, and the drain does not linger, unless `settings` say otherwise.
    """
    defaults: dict[str, Any] = {
        "port": 0,
        "metrics_port": 0,
        "drain_linger": 0.0,
        "cpu_threads": 1,
        "assert_mode": "trap",
    }
    server = Server(ServerConfig.of(model=str(directory), **(defaults | settings)), build)
    await server.listen()
    await server.load()
    try:
        async with SlipstreamClient(f"127.0.0.1:{server.port}") as client:
            yield server, client
    finally:
        await server.close(grace=0)


def emulated_config(*, rows: int = 256, overlap: bool = True, **memory: Any) -> EngineConfig:
    """Roomy limits and trapping checks; `memory` are fields of `MemoryConfig`."""
    return EngineConfig(
        model=ModelConfig("emulated"),
        memory=MemoryConfig(max_running_requests=rows, **{"max_total_tokens": rows * 64, **memory}),
        scheduler=SchedulerConfig(chunked_prefill_size=1024, max_queued_requests=100_000),
        executor=ExecutorConfig(device="cpu", overlap=overlap, assert_mode="trap"),
    )


def emulated_engine(
    tokenizer: Tokenizer, *, step_seconds: float, rows: int = 256, context: int = 4096, **options: Any
) -> AsyncEngine:
    """The production engine over an emulated device whose every token is known (`service.bench.emulated`)."""
    timeline = Timeline(step_seconds)
    model = EmulatedModel(timeline, tokenizer.vocab_size, context)
    return assemble(emulated_config(rows=rows, **options), model, tokenizer, EmulatedStreams(timeline))
