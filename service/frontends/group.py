"""The engine process with its front ends: what `service.server.Server` is to one process, this is to several.

Front ends are children, each with one end of a socket pair: the connection has no address, so nobody else can open it.
One that dies takes its own streams along and is started again; when this process dies they end theirs and exit.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import socket
import sys
import time
from asyncio.subprocess import PIPE, Process, create_subprocess_exec
from dataclasses import asdict, replace
from pathlib import Path

from prometheus_client import CollectorRegistry, ProcessCollector

from core.errors import StartupError
from service.builder import EngineBuilder, Progress, StartableEngine, in_daemon_thread
from service.config import ServerConfig
from service.engine_slot import EngineSlot
from service.frontends.host import FrontEndHost
from service.frontends.plain import to_plain
from service.frontends.wire import Kind
from service.health_port import HealthPort
from service.metrics.collector import EngineCollector, engine_view
from service.metrics.door import metrics_server
from service.metrics.http import MetricsServer
from service.metrics.names import PREFIX
from service.metrics.rpc import RpcMetrics
from service.preflight import check, model_path
from service.server import ENGINE_STOP_SECONDS, drained
from service.servicers.health import LIVENESS, READINESS, HealthServicer
from service.tenants.desk import LocalDesk
from service.version import installed_version

log = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[2]
STATE_SECONDS = 0.1
START_SECONDS = 60.0
CLOSE_SECONDS = 8.0
"""What a front end needs at most to write last statuses and close its transport."""

FIRST_BACKOFF, LONGEST_BACKOFF, LONG_ENOUGH = 0.1, 5.0, 30.0
"""Seconds before a dead front end is started again, doubled up to the longest unless it lived long enough."""


class FrontEnd:
    """One front-end process and what the engine holds for it."""

    def __init__(self, host: FrontEndHost, process: Process) -> None:
        self.host, self.process, self.since = host, process, time.monotonic()

    def kill(self) -> None:
        """End it at once."""
        if self.process.returncode is None:
            self.process.kill()


class FrontEndGroup:
    """The engine, its metrics endpoint, and N processes that serve gRPC on one port. Lives as `Server` does."""

    def __init__(self, config: ServerConfig, build: EngineBuilder, progress: Progress | None = None) -> None:
        self.config = config
        self.slot = EngineSlot()
        self.health = HealthServicer({LIVENESS: True, READINESS: False}, config.write_timeout)
        self.health_port = HealthPort(config, self.health)
        self.port = self.metrics_port = 0
        self._build, self._progress = build, progress
        self._engine: StartableEngine | None = None
        self._registry, version = CollectorRegistry(), installed_version()
        self._registry.register(EngineCollector(lambda: engine_view(self.slot, config, version, self._connected())))
        ProcessCollector(PREFIX, registry=self._registry)
        self._counts = RpcMetrics(self._registry)
        self._metrics: MetricsServer | None = None
        self._desk = LocalDesk(self.slot, config, self._counts)
        self._reserved: socket.socket | None = None
        self._leaving = False
        self._front_ends: list[FrontEnd | None] = [None] * config.frontends
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def engine(self) -> StartableEngine:
        """The engine; only after `load`."""
        assert self._engine is not None, "loaded"
        return self._engine

    async def listen(self) -> None:
        """Check files and ports, start the front ends and wait until all of them listen. Raises StartupError."""
        check(self.config)
        self._metrics = metrics_server(self.config, self._registry, self.slot, installed_version())
        self.metrics_port = self._metrics.port
        await self.health_port.listen()
        self._reserved = reserve(self.config.host, self.config.port)
        self.port = self._reserved.getsockname()[1]
        await asyncio.gather(*(self._spawn(place) for place in range(self.config.frontends)))
        await self._all("listening")
        if any(front_end.host.lost for front_end in self._running()):
            await self.close(grace=0)
            raise StartupError(f"a front end cannot listen on {self.config.host}:{self.port}")
        self._tasks = [asyncio.create_task(self._keep(place)) for place in range(self.config.frontends)]
        self._tasks.append(asyncio.create_task(self._publish()))

    async def load(self) -> None:
        """Build and start the engine, then have every front end report ready. Raises StartupError."""
        config = self.config.engine_config(str(model_path(self.config)))
        engine = await in_daemon_thread(lambda: self._build(config, self._progress))
        self._engine = engine
        await engine.start()
        self.slot.engine = engine
        for front_end in self._running():
            self._greet(front_end)
        await self._all("serving")
        self.health.set(READINESS, True)

    async def _all(self, reached: str) -> None:
        """Wait until every front end is `listening` or `serving`, or gone. Raises StartupError."""
        events: list[asyncio.Event] = [getattr(front_end.host, reached) for front_end in self._running()]
        try:
            async with asyncio.timeout(START_SECONDS):
                for event in events:
                    await event.wait()
        except TimeoutError:
            await self.close(grace=0)
            raise StartupError(f"not every front end was {reached} within {START_SECONDS:g} seconds") from None

    async def drain(self, linger: float, grace: float) -> int:
        """As `Server.drain`, in every front end."""
        self.slot.draining = True
        self.health.set(READINESS, False)
        self._send_state()
        await asyncio.sleep(linger)
        self._leaving = True
        self._send_state()
        cut = await drained(self.engine, grace)
        await self.close()
        return cut

    async def die(self) -> None:
        """The engine is dead: the front ends say so to everyone, and everything ends."""
        self.slot.draining = True
        for service in (LIVENESS, READINESS):
            self.health.set(service, False)
        await self.close(dead=True)

    async def close(self, grace: float = CLOSE_SECONDS, dead: bool = False) -> None:
        """Close the front ends, at once without grace, then the engine. Bounded throughout."""
        self.health.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        running = self._running()
        if grace > 0:
            self._send_state()
            for front_end in running:
                front_end.host.send(Kind.CLOSE, {"dead": dead})
            done = [asyncio.ensure_future(front_end.process.wait()) for front_end in running]
            if done:
                await asyncio.wait(done, timeout=grace)
        for front_end in running:
            front_end.kill()
            await front_end.process.wait()
            front_end.host.link.close()
        if self._engine is not None:
            try:
                async with asyncio.timeout(ENGINE_STOP_SECONDS):
                    await self._engine.stop()
            except TimeoutError:
                log.error("the engine did not stop within %g seconds", ENGINE_STOP_SECONDS)
        await self.health_port.close()
        if self._metrics is not None:
            self._metrics.close()
        if self._reserved is not None:
            self._reserved.close()

    def _running(self) -> list[FrontEnd]:
        return [front_end for front_end in self._front_ends if front_end is not None]

    def _connected(self) -> int:
        return sum(not front_end.host.lost for front_end in self._running())

    async def _spawn(self, place: int) -> FrontEnd:
        ours, theirs = socket.socketpair()
        gone = asyncio.Event()
        host = FrontEndHost(self.slot, self._desk, self._counts, gone.set)
        await asyncio.get_running_loop().create_unix_connection(lambda: host.link, sock=ours)
        with theirs:
            process = await create_subprocess_exec(
                *(sys.executable, "-P", "-m", "service.frontends.process", str(theirs.fileno())),
                stdin=PIPE,
                pass_fds=(theirs.fileno(),),
                # Whatever this process was started from, the front end must import the same package.
                env=os.environ | {"PYTHONPATH": str(ROOT)},
            )
        assert process.stdin is not None
        process.stdin.write(json.dumps(asdict(self._settings())).encode())
        process.stdin.close()
        front_end = self._front_ends[place] = FrontEnd(host, process)
        if self.slot.engine is not None:
            self._greet(front_end)
        return front_end

    def _settings(self) -> ServerConfig:
        """What one front end is told: the port taken for all of them, and its part of limits that hold for all."""
        config, count = self.config, self.config.frontends
        limit = config.max_concurrent_requests
        return replace(
            config,
            port=self.port,
            rate_limit=None if config.rate_limit is None else config.rate_limit / count,
            max_concurrent_requests=None if limit is None else math.ceil(limit / count),
        )

    def _greet(self, front_end: FrontEnd) -> None:
        front_end.host.send(Kind.STATE, self._state())
        front_end.host.send(Kind.READY, to_plain(self.engine.model_info))

    async def _keep(self, place: int) -> None:
        """Start the front end again whenever it dies."""
        backoff = FIRST_BACKOFF
        while True:
            front_end = self._front_ends[place]
            assert front_end is not None, "spawned"
            code = await front_end.process.wait()
            log.error("a front end ended with %s; its streams are lost, another one starts", code)
            front_end.host.link.close()
            if time.monotonic() - front_end.since > LONG_ENOUGH:
                backoff = FIRST_BACKOFF
            self._counts.frontend_restarted()
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, LONGEST_BACKOFF)
            await self._spawn(place)

    async def _publish(self) -> None:
        while True:
            await asyncio.sleep(STATE_SECONDS)
            if self.slot.engine is not None:
                self._send_state()

    def _send_state(self) -> None:
        state = self._state()
        for front_end in self._running():
            if not front_end.host.link.full:
                front_end.host.send(Kind.STATE, state)

    def _state(self) -> dict[str, object]:
        live = 0 if self._engine is None else self._engine.live_requests
        return {
            "state": self.slot.state.value,
            "draining": self.slot.draining,
            "leaving": self._leaving,
            "live": live,
            # Histograms are a tenth of a millisecond to write, ten times a second, and only the metrics show them.
            "stats": to_plain(replace(self.slot.stats, histograms={})),
        }


def reserve(host: str, port: int) -> socket.socket:
    """A socket that holds the port for the front ends and never listens. Raises StartupError."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        held = socket.socket(found[0], found[1], found[2])
        try:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            held.bind(found[4])
        except OSError:
            held.close()
            raise
    except OSError as error:
        raise StartupError(f"cannot listen on {host}:{port} (gRPC): {error.strerror or error}") from None
    return held
