"""An engine that is built and runs nowhere yet."""

from __future__ import annotations

import gc

from core.engine.async_engine import AsyncEngine
from core.engine.engine_parts import EngineParts


class BuiltEngine(EngineParts):
    """What `core.engine.build` makes, off the event loop."""

    async def start(self) -> AsyncEngine:
        """The engine on the running loop, with its threads and tasks. Called once: the pools are this engine's."""
        try:
            engine = AsyncEngine(self)
        except BaseException:
            self.disagg.close()
            raise
        # Weights and modules live as long as the process: frozen, they are not walked by a collection during a step.
        gc.collect()
        gc.freeze()
        return engine
