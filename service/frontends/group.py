"""The engine process with its front ends: a server of several processes, as `service.server.server.Server` is of one.

Front ends are child processes, each with one end of a socket pair. The connection has no address, so no other process
can open it. A front end that dies loses its own streams, and another is started. When the engine process dies, the
front ends end their streams and exit.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import socket
import sys
import time
from asyncio.subprocess import PIPE, create_subprocess_exec
from dataclasses import replace
from typing import Any

from core.engine.api import Engine
from core.errors import StartupError
from core.types.plain import to_plain
from service.access.access_files import AccessFiles
from service.calls.desk import LocalDesk
from service.config.server_config import ServerConfig
from service.config.sources import values_of
from service.engine.builder import EngineBuilder, Progress
from service.engine.handle import EngineHandle
from service.frontends.front_end import START_SECONDS, FrontEnd
from service.frontends.heartbeat import PERIOD
from service.frontends.host import FrontEndHost
from service.frontends.wire import Kind
from service.process.child import environment
from service.server.metrics_port import MetricsPort
from service.server.served_engine import ServedEngine
from service.server.startup_checks import check

log = logging.getLogger(__name__)

STATE_SECONDS = 0.1
"""Seconds between two STATE frames to each front end."""
CLOSE_SECONDS = 8.0
"""Seconds that a front end has to write last statuses and close its transport; then it is killed."""

FIRST_BACKOFF, LONGEST_BACKOFF, LONG_ENOUGH = 0.1, 5.0, 30.0
"""Seconds before a dead front end is started again: FIRST_BACKOFF, doubled with each further death up to
LONGEST_BACKOFF. After a front end that lived longer than LONG_ENOUGH seconds it is FIRST_BACKOFF again."""


class FrontEndGroup:
    """The engine, its metrics endpoint, and N processes that serve gRPC on one port.

    Called as `Server` is: `listen`, `load`, then `drain` or `die`.
    """

    def __init__(self, config: ServerConfig, build: EngineBuilder, progress: Progress | None = None) -> None:
        self.config = config
        self.handle = EngineHandle()
        self.port = 0
        self._served = ServedEngine(config, build, progress, self.handle)
        files = AccessFiles(config)
        self.metrics = MetricsPort(config, self.handle, files, self._connected)
        self._desk = LocalDesk(self.handle, config, self.metrics.calls, files)
        self._reserved: list[socket.socket] = []
        self._health_port: int | None = None
        self._leaving = False
        self._front_ends: list[FrontEnd | None] = [None] * config.frontends
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def engine(self) -> Engine:
        """The engine; only after `load`."""
        return self._served.engine

    @property
    def metrics_port(self) -> int:
        """The port of the metrics endpoint; 0 before `listen`."""
        return self.metrics.port

    async def listen(self) -> None:
        """Check files and ports, start the front ends and wait until all of them listen. Raises StartupError."""
        check(self.config)
        self.metrics.listen()
        try:
            self.port = self._reserve(self.config.port, "gRPC")
            if self.config.health_port is not None:
                self._health_port = self._reserve(self.config.health_port, "health")
        except StartupError:
            await self.close(grace=0)
            raise
        await asyncio.gather(*(self._spawn(place) for place in range(self.config.frontends)))
        await self._all("listening")
        if any(front_end.host.lost for front_end in self._running()):
            await self.close(grace=0)
            raise StartupError(f"a front end cannot listen on {self.config.host}:{self.port}")
        self._tasks = [asyncio.create_task(self._keep(place)) for place in range(self.config.frontends)]
        self._tasks += [asyncio.create_task(self._publish()), asyncio.create_task(self._look())]

    def _reserve(self, port: int, purpose: str) -> int:
        self._reserved.append(reserve(self.config.host, port, purpose))
        return int(self._reserved[-1].getsockname()[1])

    async def load(self) -> None:
        """Build and start the engine, then have every front end report ready. Raises StartupError."""
        self._desk.follow(await self._served.load())
        for front_end in self._running():
            self._greet(front_end)
        await self._all("serving")

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
        """End the server in order, as `Server.drain` does, with every front end. Returns the number of requests cut.

        (1) For `linger` seconds the front ends report not ready and still take calls. (2) They turn new calls away,
        and live requests have `grace` seconds. (3) Everything is closed.
        """
        self.handle.draining = True
        self._send_state()
        await asyncio.sleep(linger)
        self._leaving = True
        # Now, not with the next period: front ends must close their port when the engine begins to refuse, not later.
        self._send_state()
        cut = await self._served.drain(grace)
        await self.close()
        return cut

    async def die(self) -> None:
        """The engine is dead: the front ends end all calls with that status, and everything is closed."""
        self.handle.draining = True
        await self.close(dead=True)

    async def close(self, grace: float = CLOSE_SECONDS, dead: bool = False) -> None:
        """Close the front ends within `grace` seconds (0: kill them at once), then the engine. Each wait is bounded."""
        # First, so that `_keep` does not start again the front ends that end here.
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
        await self._served.stop(grace)
        self.metrics.close()
        for held in self._reserved:
            held.close()

    def _running(self) -> list[FrontEnd]:
        return [front_end for front_end in self._front_ends if front_end is not None]

    def _connected(self) -> int:
        return sum(not front_end.host.lost for front_end in self._running())

    async def _spawn(self, place: int) -> FrontEnd:
        ours, theirs = socket.socketpair()
        host = FrontEndHost(self.handle, self._desk, self.metrics.calls, on_lost=lambda: None)
        await asyncio.get_running_loop().create_unix_connection(lambda: host.link, sock=ours)
        with theirs:
            process = await create_subprocess_exec(
                *(sys.executable, "-P", "-m", "service.frontends.process", str(theirs.fileno())),
                stdin=PIPE,
                pass_fds=(theirs.fileno(),),
                env=environment(),
            )
        assert process.stdin is not None
        process.stdin.write(json.dumps(values_of(self._settings())).encode())
        process.stdin.close()
        front_end = self._front_ends[place] = FrontEnd(host, process)
        if self.handle.engine is not None:
            self._greet(front_end)
        return front_end

    def _settings(self) -> ServerConfig:
        """The settings of one front end: the port reserved for all, and its part of each limit that holds for all."""
        config, count = self.config, self.config.frontends
        limit = config.max_concurrent_requests
        return replace(
            config,
            port=self.port,
            health_port=self._health_port,
            rate_limit=None if config.rate_limit is None else config.rate_limit / count,
            max_concurrent_requests=None if limit is None else math.ceil(limit / count),
        )

    def _greet(self, front_end: FrontEnd) -> None:
        # STATE first: with READY the front end begins to serve, and its copy of the state would still be STARTING.
        front_end.host.send(Kind.STATE, self._state())
        front_end.host.send(Kind.READY, to_plain(self.engine.model_info))

    async def _keep(self, place: int) -> None:
        """Start another front end at `place` whenever the one there dies."""
        backoff = FIRST_BACKOFF
        while True:
            front_end = self._front_ends[place]
            assert front_end is not None, "spawned"
            code = await front_end.process.wait()
            log.error("a front end ended with %s; its streams are lost, another one starts", code)
            front_end.host.link.close()
            if time.monotonic() - front_end.since > LONG_ENOUGH:
                backoff = FIRST_BACKOFF
            self.metrics.calls.frontend_restarted()
            await self._spawn_after(backoff, place)
            backoff = min(2 * backoff, LONGEST_BACKOFF)

    async def _spawn_after(self, backoff: float, place: int) -> None:
        """Start a front end after `backoff` seconds. If the system has no process or descriptor left, try again."""
        while True:
            await asyncio.sleep(backoff)
            try:
                await self._spawn(place)
            except OSError as error:
                log.error("a front end cannot be started: %s", error.strerror or error)
                backoff = LONGEST_BACKOFF
            else:
                return

    async def _publish(self) -> None:
        while True:
            await asyncio.sleep(STATE_SECONDS)
            self._send_state()

    async def _look(self) -> None:
        """Kill front ends that have sent nothing for too long; `_keep` starts others."""
        while True:
            await asyncio.sleep(PERIOD)
            for front_end in self._running():
                front_end.look(time.monotonic())

    def _send_state(self) -> None:
        state = self._state()
        for front_end in self._running():
            # A front end that does not read must not collect a state every STATE_SECONDS; the next one replaces it.
            if not front_end.host.link.full:
                front_end.host.send(Kind.STATE, state)

    def _state(self) -> dict[str, object]:
        return {
            "state": self.handle.state.value,
            "draining": self.handle.draining,
            "leaving": self._leaving,
            "live": self._served.live_requests,
            # Histograms take 0.1 ms to write, ten times a second, and only the metrics endpoint shows them.
            "stats": to_plain(replace(self.handle.stats, histograms={})),
        }


def reserve(host: str, port: int, purpose: str) -> socket.socket:
    """Bind a socket that holds the port for the front ends and never listens. Raises StartupError if it cannot."""
    failed = OSError("no address")
    try:
        # A name can stand for several addresses, of which some are not this machine's.
        for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE):
            try:
                return _held(found)
            except OSError as error:
                failed = error
    except OSError as error:
        failed = error
    raise StartupError(f"cannot listen on {host}:{port} ({purpose}): {failed.strerror or failed}")


def _held(found: Any) -> socket.socket:
    held = socket.socket(found[0], found[1], found[2])
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(found[4])
    except OSError:
        held.close()
        raise
    return held
