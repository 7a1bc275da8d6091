"""An engine for one command, in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from core.engine.api import Engine
from service.checkpoints.fetching import fetched
from service.checkpoints.files import check_model
from service.checkpoints.model_name import hub_model
from service.cli.progress import TerminalProgress
from service.config.server_config import ServerConfig
from service.engine import builder
from service.engine.builder import in_daemon_thread
from service.server.startup_checks import check_adapters


@asynccontextmanager
async def local_engine(config: ServerConfig) -> AsyncIterator[Engine]:
    """A started engine, which is stopped when the block ends. Loading shows its progress. Raises StartupError."""
    if hub_model(config.engine.model.path) is None:
        check_model(config.model_path)
    check_adapters(config)
    progress = TerminalProgress()
    try:
        built = await in_daemon_thread(
            lambda: builder.build_core_engine(fetched(config.engine_config(), progress), progress)
        )
    finally:
        progress.close()
    engine = await built.start()
    try:
        yield engine
    finally:
        await engine.stop()
