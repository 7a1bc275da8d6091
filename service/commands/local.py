"""An engine for one command, in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from service import builder
from service.builder import StartableEngine, in_daemon_thread
from service.config import ServerConfig
from service.preflight import check_adapters, check_model, model_path
from service.progress import TerminalProgress


@asynccontextmanager
async def local_engine(config: ServerConfig) -> AsyncIterator[StartableEngine]:
    """A started engine that is stopped at the end; loading it shows its progress. Raises StartupError."""
    path = model_path(config)
    check_model(path)
    check_adapters(config)
    progress = TerminalProgress()
    engine = await in_daemon_thread(lambda: builder.build_core_engine(config.engine_config(str(path)), progress))
    progress.close()
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()
