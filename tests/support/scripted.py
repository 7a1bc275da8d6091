"""Fixtures: a server over a scripted engine, on free loopback ports, with a client; and a small real checkpoint."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from service.access import timed_look
from service.client import SlipstreamClient
from service.config.server_config import ServerConfig
from service.server.server import Server
from tests.support.fakes.fake_engine import FakeEngine
from tests.support.least_checkpoint import write_checkpoint
from tests.support.servers import Serve, Serving, loaded


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
        async with loaded(Server(config(**changes), lambda *_: engine)) as server:
            async with SlipstreamClient(f"127.0.0.1:{server.port}") as client:
                yield Serving(server, engine, client)

    return run


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real Llama checkpoint of 320 tokens of vocabulary and 1024 of context."""
    # Every run of pytest imports this file, and few need what takes seconds to import.
    from tests.support.checkpoints import make_checkpoint

    return make_checkpoint("llama", tmp_path_factory.mktemp("checkpoint-of-the-operator") / "tiny")


@pytest.fixture(autouse=True)
def _looked_at_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that a test has just written is looked at, also a moment after the last look and on a busy machine."""
    monkeypatch.setattr(timed_look, "FRESH_SECONDS", 0.0)
    monkeypatch.setattr(timed_look, "LOOK_SECONDS", 60.0)
