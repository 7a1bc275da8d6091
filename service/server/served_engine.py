"""The engine of a server's process: built off the loop, started, drained and stopped, each within bounds."""

from __future__ import annotations

import asyncio
import logging

from service.config.server_config import ServerConfig
from service.engine.builder import EngineBuilder, Progress, StartableEngine, in_daemon_thread
from service.engine.slot import EngineSlot

log = logging.getLogger(__name__)

DRAIN_MARGIN_SECONDS = 5.0
ENGINE_STOP_SECONDS = 10.0
HURRIED_STOP_SECONDS = 1.0
"""What an engine gets where the process is to end at once: the signal that asked for it does not wait for a device."""


class ServedEngine:
    """None until `load` has built it; in `slot`, where calls find it, once it has started."""

    def __init__(self, config: ServerConfig, build: EngineBuilder, progress: Progress | None, slot: EngineSlot) -> None:
        self._config = config
        self._build, self._progress = build, progress
        self._slot = slot
        self._engine: StartableEngine | None = None

    @property
    def engine(self) -> StartableEngine:
        """The engine; only after `load`."""
        assert self._engine is not None, "loaded"
        return self._engine

    @property
    def live_requests(self) -> int:
        """Streams opened and not yet ended; 0 without an engine."""
        return 0 if self._engine is None else self._engine.live_requests

    async def load(self) -> StartableEngine:
        """Build and start the engine. Raises StartupError."""
        config = self._config.engine_config(str(self._config.model_path))
        # Kept before it starts: what was built is stopped, however far it got.
        self._engine = engine = await in_daemon_thread(lambda: self._build(config, self._progress))
        await engine.start()
        self._slot.engine = engine
        return engine

    async def drain(self, grace: float) -> int:
        """How many streams a drain cut; see `drained`."""
        return await drained(self.engine, grace)

    async def stop(self, grace: float) -> None:
        """Stop what was built; see `stopped`."""
        if self._engine is not None:
            await stopped(self._engine, grace)


async def drained(engine: StartableEngine, grace: float) -> int:
    """How many streams a drain cut; 0 where it did not end in time.

    The engine keeps to its grace unless a step hangs; that must not hold up the exit of the process.
    """
    try:
        async with asyncio.timeout(grace + DRAIN_MARGIN_SECONDS):
            return await engine.drain(grace)
    except TimeoutError:
        log.error("the engine did not drain in time")
        return 0


async def stopped(engine: StartableEngine, grace: float) -> None:
    """Stop the engine within ENGINE_STOP_SECONDS, without grace HURRIED_STOP_SECONDS; one that hangs is left behind."""
    seconds = ENGINE_STOP_SECONDS if grace > 0 else HURRIED_STOP_SECONDS
    try:
        async with asyncio.timeout(seconds):
            await engine.stop()
    except TimeoutError:
        log.error("the engine did not stop within %g seconds", seconds)
