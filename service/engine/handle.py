"""The one object by which all rooms reach the engine: while it is being built, while it serves and while it drains."""

from __future__ import annotations

import time
from collections.abc import Awaitable
from typing import TypeVar

from core.engine.api import Engine, EngineState
from core.types.stats import EngineStats
from service.errors import EngineSilent, NotReady

Answer = TypeVar("Answer")


async def answered(answer: Answer | Awaitable[Answer]) -> Answer:
    """The engine's answer; waits for it where the engine is in another process."""
    return await answer if isinstance(answer, Awaitable) else answer


class EngineHandle:
    """Empty until the model is loaded. All but the two setters may be read from any thread."""

    def __init__(self) -> None:
        self.startup_seconds = 0.0
        """Seconds from the making of this handle to the engine's readiness; 0 until then."""
        self.silent = False
        """Whether the engine is in another process that has said nothing for some seconds: new calls are refused."""
        self._engine: Engine | None = None
        self._born = time.monotonic()
        self._draining_since: float | None = None

    @property
    def engine(self) -> Engine | None:
        """The engine; None until the model is loaded."""
        return self._engine

    @engine.setter
    def engine(self, engine: Engine | None) -> None:
        self._engine = engine
        self.startup_seconds = time.monotonic() - self._born

    @property
    def draining(self) -> bool:
        """Set before the engine itself refuses requests: a drain first lingers so that clients can learn of it."""
        return self._draining_since is not None

    @draining.setter
    def draining(self, draining: bool) -> None:
        if draining and self._draining_since is None:
            self._draining_since = time.monotonic()

    @property
    def drain_seconds(self) -> float:
        """Seconds since the drain began; 0 before."""
        return 0.0 if self._draining_since is None else time.monotonic() - self._draining_since

    def require(self) -> Engine:
        """The engine. Raises NotReady while there is none, and EngineSilent while its process sends nothing."""
        if self._engine is None:
            raise NotReady("the model is still being loaded")
        if self.silent:
            raise EngineSilent("the engine's process does not answer")
        return self._engine

    @property
    def state(self) -> EngineState:
        """The server's state as clients see it."""
        if self._engine is None:
            return EngineState.DRAINING if self.draining else EngineState.STARTING
        state = self._engine.state
        return EngineState.DRAINING if self.draining and state is EngineState.READY else state

    @property
    def stats(self) -> EngineStats:
        """The engine's newest snapshot; an empty one before there is an engine."""
        return EngineStats() if self._engine is None else self._engine.stats
