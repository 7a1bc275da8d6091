"""Servers in this process: one way to start them, and a door to one that serves a real checkpoint.

The door to a scripted engine is the fixture `serve` of tests/contract/api/conftest.py.
"""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from service.client import SlipstreamClient
from service.config.server_config import ServerConfig
from service.engine.builder import EngineBuilder, build_core_engine
from service.server.server import Server
from tests.support.fakes.fake_engine import FakeEngine
from tests.support.until import PATIENCE

ONCE = (("grpc.enable_retries", 0),)
"""Options of a client that shows the first refusal, whatever the published policy would do about it."""


class Startable(Protocol):
    """A server with its own handlers, or one with front ends."""

    async def listen(self) -> None: ...

    async def load(self) -> None: ...

    async def close(self, grace: float) -> None: ...


Started = TypeVar("Started", bound=Startable)


@asynccontextmanager
async def listening(server: Started) -> AsyncIterator[Started]:
    """Its ports are open and it has no engine yet; closed at the end without grace, whatever became of it."""
    await server.listen()
    try:
        yield server
    finally:
        await server.close(grace=0)


@asynccontextmanager
async def loaded(server: Started) -> AsyncIterator[Started]:
    """It listens and is ready."""
    async with listening(server):
        await server.load()
        yield server


@asynccontextmanager
async def serve_checkpoint(
    directory: Path, build: EngineBuilder = build_core_engine, **settings: Any
) -> AsyncIterator[tuple[Server, SlipstreamClient]]:
    """The production server on a free port, around that checkpoint or what `build` makes, and a client of it.

    Math runs on one thread, device checks trap, and the drain does not linger, unless `settings` say otherwise.
    """
    defaults: dict[str, Any] = {
        "port": 0,
        "metrics_port": 0,
        "drain_linger": 0.0,
        "cpu_threads": 1,
        "assert_mode": "trap",
    }
    async with loaded(Server(ServerConfig.of(model=str(directory), **(defaults | settings)), build)) as server:
        async with SlipstreamClient(f"127.0.0.1:{server.port}") as client:
            yield server, client


@dataclass
class Serving:
    """A running server, the scripted engine behind it and a client in front of it."""

    server: Server
    engine: FakeEngine
    client: SlipstreamClient

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.server.port}"

    @property
    def stub(self) -> Any:
        return self.client.stub

    async def metrics(self) -> str:
        """The text of /metrics."""
        address = f"http://127.0.0.1:{self.server.metrics_port}/metrics"

        def scrape() -> str:
            with urllib.request.urlopen(address, timeout=PATIENCE) as response:
                return str(response.read().decode())

        return await asyncio.to_thread(scrape)

    async def metric(self, series: str) -> float:
        """The value of one series, spelled as in the text format; 0 if it is absent."""
        for line in (await self.metrics()).splitlines():
            name, _, value = line.rpartition(" ")
            if name == series:
                return float(value)
        return 0.0


Serve = Callable[..., AbstractAsyncContextManager[Serving]]
"""Of the fixture `serve`."""
