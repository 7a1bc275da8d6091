"""A server over a scripted engine, on free loopback ports, and a client of it."""

from __future__ import annotations

import asyncio
import json
import struct
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from service.client import SlipstreamClient
from service.config.server_config import ServerConfig
from service.server.server import Server
from tests.fakes.fake_engine import FakeEngine
from tests.support.until import PATIENCE

ONCE = (("grpc.enable_retries", 0),)
"""Options of a client that shows the first refusal, whatever the published policy would do about it."""

"""Seconds after which an awaited event counts as missing; nothing here takes a tenth of it."""


@dataclass
class Serving:
    """A running server, the engine behind it and a client in front of it."""

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


def write_checkpoint(folder: Path) -> Path:
    """The least that passes for a checkpoint before it is opened: a config and one empty safetensors file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    header = json.dumps({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4)
    return folder


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A folder that passes for a checkpoint."""
    return write_checkpoint(tmp_path / "checkpoint")


@pytest.fixture
def config(checkpoint: Path) -> Callable[..., ServerConfig]:
    """Makes configurations on free ports."""

    def make(**changes: Any) -> ServerConfig:
        settings: dict[str, Any] = {"model": str(checkpoint), "port": 0, "metrics_port": 0, "drain_linger": 0.0}
        return ServerConfig.of(**(settings | changes))

    return make


@pytest.fixture
def serve(config: Callable[..., ServerConfig]) -> Serve:
    """`async with serve(engine, **config) as serving`: a loaded server."""

    @asynccontextmanager
    async def run(engine: FakeEngine | None = None, **changes: Any) -> AsyncIterator[Serving]:
        engine = engine or FakeEngine()
        server = Server(config(**changes), lambda *_: engine)
        await server.listen()
        await server.load()
        client = SlipstreamClient(f"127.0.0.1:{server.port}")
        try:
            yield Serving(server, engine, client)
        finally:
            await client.close()
            await server.close(grace=0)

    return run
