"""An engine for one command, in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from core.engine.api import Engine
from service.cli.progress import TerminalProgress
from service.config.server_config import ServerConfig
from service.engine import builder
from service.engine.builder import in_daemon_thread
from service.server.startup_checks import check_adapters, check_model


@asynccontextmanager
async def local_engine(config: ServerConfig) -> AsyncIterator[Engine]:
    """A started engine, which is stopped when the block ends. Loading shows its progress. Raises StartupError."""
    path = config.model_path
    check_model(path)
    check_adapters(config)
    progress = TerminalProgress()
    try:
        built = await in_daemon_thread(lambda: builder.build_core_engine(config.engine_config(), progress))
    finally:
        progress.close()
    engine = await built.start()
    try:
        yield engine
    finally:
        await engine.stop()
