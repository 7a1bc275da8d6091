"""Watches the page's events over a socket of its own, as a browser does, and no more politely than a test wants."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from core.engine.async_engine import AsyncEngine
from core.engine.built_engine import BuiltEngine
from core.models.bundled import bundled_model_dir
from core.text.tokenizer import Tokenizer
from service.client import SlipstreamClient
from service.server.server import Server
from tests.support.fakes.emulated_engine import emulated_engine
from tests.support.servers import serve_checkpoint
from tests.support.until import until
from tests.support.within import within

PATIENCE = 20.0
STEP_SECONDS = 0.004
LONGEST = 16384
"""Tokens of a stream that goes on for a minute."""


@dataclass(frozen=True)
class Answer:
    """All of an HTTP answer."""

    status: int
    headers: dict[str, str]
    body: str


class Reading:
    """An answer that is read as it comes. `close` hangs up."""

    def __init__(
        self, status: int, headers: dict[str, str], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.status, self.headers, self.writer, self._reader = status, headers, writer, reader

    async def body(self) -> str:
        """What comes until the server hangs up."""
        async with within(PATIENCE, "the server hangs up"):
            return (await self._reader.read()).decode()

    async def event(self) -> dict[str, Any] | None:
        """The data of the next event; None after the last."""
        async with asyncio.timeout(PATIENCE):
            while line := (await self._reader.readline()).decode():
                if line.startswith("data: "):
                    found: dict[str, Any] = json.loads(line.removeprefix("data: "))
                    return found
        return None

    async def close(self) -> None:
        """Hang up. Idempotent."""
        self.writer.close()
        with suppress(ConnectionError):
            await self.writer.wait_closed()


@asynccontextmanager
async def request(
    port: int, path: str, method: str = "GET", receive_buffer: int | None = None
) -> AsyncIterator[Reading]:
    """The answer to one request once it begins; `receive_buffer`: bytes that the system keeps for a lazy reader."""
    connection = socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=connection, limit=1 << 22)
    writer.write(f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
    async with asyncio.timeout(PATIENCE):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    pairs = (line.split(": ", 1) for line in head[1:] if line)
    reading = Reading(int(head[0].split()[1]), {name.lower(): value for name, value in pairs}, reader, writer)
    try:
        yield reading
    finally:
        await reading.close()


async def asked(port: int, path: str, method: str = "GET") -> Answer:
    """The whole answer to one request."""
    async with request(port, path, method) as reading:
        return Answer(reading.status, reading.headers, await reading.body())


@asynccontextmanager
async def watched(port: int, **options: Any) -> AsyncIterator[Reading]:
    """The events of the page, for as long as somebody looks."""
    async with request(port, "/ui/events", **options) as reading:
        assert reading.status == 200, await reading.body()
        yield reading


def timed_engine(rows: int = 8) -> BuiltEngine:
    """The production engine over a device that is a timer: steps take `STEP_SECONDS`, and every token is known."""
    tokenizer = Tokenizer.load(str(bundled_model_dir()))
    room = {"context": LONGEST, "max_total_tokens": rows * LONGEST}
    return emulated_engine(tokenizer, step_seconds=STEP_SECONDS, rows=rows, **room)


@asynccontextmanager
async def serve_emulated(*, ui: bool = True, rows: int = 8, **settings: Any) -> AsyncIterator[Serving]:
    """A server with such an engine."""
    built = timed_engine(rows)
    async with serve_checkpoint(bundled_model_dir(), lambda *_: built, ui=ui, **settings) as (server, client):
        yield _serving(server, client)


@asynccontextmanager
async def serve_bundled(**settings: Any) -> AsyncIterator[Serving]:
    """A server with the bundled model and its page."""
    async with serve_checkpoint(bundled_model_dir(), ui=True, **settings) as (server, client):
        yield _serving(server, client)


def _serving(server: Server, client: SlipstreamClient) -> Serving:
    assert isinstance(server.engine, AsyncEngine)
    return Serving(server, server.engine, client)


@dataclass
class Serving:
    """A running server, its engine and a client of it."""

    server: Server
    engine: AsyncEngine
    client: SlipstreamClient

    @property
    def port(self) -> int:
        """Of the metrics."""
        return self.server.metrics_port

    @property
    def watchers(self) -> int:
        """Pages that are open."""
        door = self.server.metrics._server._door  # type: ignore[union-attr]
        return 0 if door is None else door.feed.watchers

    async def metrics(self) -> dict[str, float]:
        """Every series of one scrape."""
        lines = (await asked(self.port, "/metrics")).body.splitlines()
        samples = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        return {series: float(value) for series, _, value in samples}

    @asynccontextmanager
    async def running(self, count: int, tokens: int = LONGEST - 100) -> AsyncIterator[None]:
        """So many streams that decode until the end, with the ids look-0, look-1 and so on."""
        tasks = []
        try:
            for number in range(count):
                asking = self.client.complete(
                    f"secret {number}", max_tokens=tokens, ignore_eos=True, request_id=f"look-{number}"
                )
                tasks.append(asyncio.create_task(asking))
                await until(lambda: self.engine.live_requests == len(tasks) or any(task.done() for task in tasks))
            yield
            assert not any(task.done() for task in tasks), [task for task in tasks if task.done()]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
