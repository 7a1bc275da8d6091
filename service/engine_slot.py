"""Where the engine is while it is being built, while it serves and while it drains: one object that all rooms share."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TypeVar

from core.engine.door import Engine, EngineState
from core.types.stats import EngineStats
from service.status import NotReady

Answer = TypeVar("Answer")


async def answered(answer: Answer | Awaitable[Answer]) -> Answer:
    """What the engine says, now or, from another process, later."""
    return await answer if isinstance(answer, Awaitable) else answer


class EngineSlot:
    """Empty until the model is loaded. `stats` and `state` may be read from any thread."""

    def __init__(self) -> None:
        self.engine: Engine | None = None
        # Set before the engine itself refuses requests: a drain first lingers so that clients can learn of it.
        self.draining = False

    def require(self) -> Engine:
        """The engine; raises NotReady while there is none."""
        if self.engine is None:
            raise NotReady("the model is still being loaded")
        return self.engine

    @property
    def state(self) -> EngineState:
        """The server's state as clients see it."""
        if self.engine is None:
            return EngineState.DRAINING if self.draining else EngineState.STARTING
        state = self.engine.state
        return EngineState.DRAINING if self.draining and state is EngineState.READY else state

    @property
    def stats(self) -> EngineStats:
        """The engine's newest snapshot, an empty one before there is an engine."""
        return EngineStats() if self.engine is None else self.engine.stats
