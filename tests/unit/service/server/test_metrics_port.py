"""The metrics of the engine's process: what they are collected from, and when their port answers."""

from __future__ import annotations

import asyncio
import urllib.error
import urllib.request
from collections.abc import Callable

import pytest

from service.access.access_files import AccessFiles
from service.config.server_config import ServerConfig
from service.engine.handle import EngineHandle
from service.server.metrics_port import MetricsPort


async def test_it_shows_calls_front_ends_and_the_process_from_listen_to_close(
    config: Callable[..., ServerConfig],
) -> None:
    settings = config()
    metrics = MetricsPort(settings, EngineHandle(), AccessFiles(settings), lambda: 3)

    def scrape() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{metrics.port}/metrics", timeout=5) as response:
            return str(response.read().decode())

    metrics.close()
    assert metrics.port == 0, "nothing to close yet"
    metrics.listen()
    metrics.calls.frontend_restarted()
    shown = await asyncio.to_thread(scrape)
    for line in ("slipstream_frontends_running 3.0", "slipstream_frontend_restarts_total 1.0"):
        assert line in shown.splitlines()
    assert "slipstream_process_open_fds" in shown
    metrics.close()
    metrics.close()
    with pytest.raises(urllib.error.URLError):
        await asyncio.to_thread(scrape)
