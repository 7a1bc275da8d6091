"""Engines without a server around them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol, TypeVar


class Startable(Protocol):
    """An engine, the production's or a scripted one."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


Started = TypeVar("Started", bound=Startable)


@asynccontextmanager
async def started(engine: Started) -> AsyncIterator[Started]:
    """It takes requests; stopped at the end, whatever became of them."""
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()
