"""Servers in processes of their own: one that many tests share, and others made to break."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.chaos.device import Faults
from tests.chaos.process import ServerProcess

WRITE_TIMEOUT = 1.0
KEEPALIVE = 1.0

Launch = Callable[..., ServerProcess]


@pytest.fixture
def launch() -> Iterator[Launch]:
    """Starts servers that may break; kills what is left of them."""
    started: list[ServerProcess] = []

    def start(faults: Faults | None = None, **settings: Any) -> ServerProcess:
        started.append(ServerProcess(faults, **settings))
        return started[-1].wait_ready()

    yield start
    for server in started:
        server.close()


@pytest.fixture(scope="session")
def shared() -> Iterator[ServerProcess]:
    """One sound server with short timeouts for every test that leaves it as it was."""
    server = ServerProcess(
        max_running_requests=128,
        max_total_tokens=128 * 1024,
        max_queued_requests=20_000,
        write_timeout=WRITE_TIMEOUT,
        keepalive_time=KEEPALIVE,
        keepalive_timeout=KEEPALIVE,
        max_concurrent_streams=1000,
        chunked_prefill_size=1024,
    )
    try:
        yield server.wait_ready()
    finally:
        server.close()
