"""The engine of a server's process: built off the loop, started, drained and stopped, each within bounds."""

from __future__ import annotations

import asyncio
import logging

from core.engine.api import Engine
from service.checkpoints.fetching import fetch
from service.checkpoints.model_name import hub_model
from service.config.server_config import ServerConfig
from service.engine.builder import EngineBuilder, Progress, in_daemon_thread
from service.engine.handle import EngineHandle

log = logging.getLogger(__name__)

DRAIN_MARGIN_SECONDS = 5.0
"""Seconds beyond its grace after which a drain of the engine counts as hung."""
ENGINE_STOP_SECONDS = 10.0
HURRIED_STOP_SECONDS = 1.0
"""Seconds that the engine has to stop where the process must end at once, after a second signal for example."""


class ServedEngine:
    """Fills `handle`: until `load` has started an engine there is none, neither for calls nor to be stopped."""

    def __init__(
        self, config: ServerConfig, build: EngineBuilder, progress: Progress | None, handle: EngineHandle
    ) -> None:
        self._config = config
        self._build, self._progress = build, progress
        self._handle = handle

    @property
    def engine(self) -> Engine:
        """The engine; only after `load`."""
        engine = self._handle.engine
        assert engine is not None, "loaded"
        return engine

    @property
    def live_requests(self) -> int:
        """Streams opened and not yet ended; 0 before `load`."""
        return 0 if self._handle.engine is None else self._handle.engine.live_requests

    async def load(self) -> Engine:
        """Build and start the engine. Raises StartupError."""
        config = self._config.engine_config()
        built = await in_daemon_thread(lambda: self._build(config, self._progress))
        self._handle.engine = engine = await built.start()
        if hub_model(config.model.path) is not None:
            # The operator trusts this hub with the model, so its other revisions may be asked for by name.
            engine.control.fetch_by(fetch)
        return engine

    async def drain(self, grace: float) -> int:
        """Drain the engine; the number of streams cut. See `drained`."""
        return await drained(self.engine, grace)

    async def stop(self, grace: float) -> None:
        """Stop the engine if it has started; see `stopped`."""
        if self._handle.engine is not None:
            await stopped(self._handle.engine, grace)


async def drained(engine: Engine, grace: float) -> int:
    """Drain the engine within `grace` seconds. Returns the number of streams cut; 0 if the drain did not end in time.

    The engine keeps to its grace unless a step hangs. A step that hangs must not hold up the exit of the process.
    """
    try:
        async with asyncio.timeout(grace + DRAIN_MARGIN_SECONDS):
            return await engine.drain(grace)
    except TimeoutError:
        log.error("the engine did not drain in time")
        return 0


async def stopped(engine: Engine, grace: float) -> None:
    """Stop the engine within ENGINE_STOP_SECONDS; without grace within HURRIED_STOP_SECONDS. Leave it if it hangs."""
    seconds = ENGINE_STOP_SECONDS if grace > 0 else HURRIED_STOP_SECONDS
    try:
        async with asyncio.timeout(seconds):
            await engine.stop()
    except TimeoutError:
        log.error("the engine did not stop within %g seconds", seconds)
