"""Engines without a server around them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol, TypeVar


class Stoppable(Protocol):
    """An engine, the production's or a scripted one."""

    async def stop(self) -> None: ...


Started = TypeVar("Started", bound=Stoppable, covariant=True)


class Startable(Protocol[Started]):
    """What an engine is started from."""

    async def start(self) -> Started: ...


@asynccontextmanager
async def started(built: Startable[Started]) -> AsyncIterator[Started]:
    """The engine of `built`, which takes requests; stopped at the end, whatever became of them."""
    engine = await built.start()
    try:
        yield engine
    finally:
        await engine.stop()
