"""One front end: `python -m service.frontends.process FD`, started by the engine process with one end of a socket pair.

It serves gRPC on the shared port and loads no model. It ends when the engine process sends CLOSE, or is gone. It
ignores signals: the engine process handles them and tells its front ends what to do.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
import time
from collections import Counter

from prometheus_client import CollectorRegistry

from core.errors import Draining, EngineDead, StartupError
from service.config.server_config import ServerConfig
from service.frontends.heartbeat import DEAD_SECONDS, PERIOD, STALE_SECONDS, Silence
from service.frontends.remote_desk import RemoteDesk
from service.frontends.remote_engine import RemoteEngine
from service.frontends.wire import Kind, pack, pack_json
from service.metrics.rpc import RpcMetrics
from service.process.logs import configure
from service.server.server import STATUS_FLUSH_SECONDS, Server

log = logging.getLogger(__name__)

COUNTS_SECONDS = 0.1
"""Seconds between two COUNTS frames."""
EXIT_ENGINE_GONE = 1


class CountedCalls(RpcMetrics):
    """Adds counts up, and sends the sums to the engine's process, which serves the metrics."""

    def __init__(self) -> None:
        super().__init__(CollectorRegistry())
        self._counts: Counter[tuple[str, tuple[str, ...]]] = Counter()

    def add(self, counter: str, labels: tuple[str, ...], amount: int = 1) -> None:
        """Add `amount` to the sum that is sent next. The engine's process checks the counter's name, not this."""
        self._counts[counter, labels] += amount

    def send(self, engine: RemoteEngine) -> None:
        """Send the sums since the last call, if there are any."""
        if self._counts:
            counts, self._counts = self._counts, Counter()
            engine.count(counts)


def read_config(text: str) -> ServerConfig:
    """The settings that the engine process has written as JSON to this process's standard input."""
    values = json.loads(text)
    values["adapter"] = tuple(map(tuple, values["adapter"]))
    return ServerConfig.of(**values)


async def serve(config: ServerConfig, sock: socket.socket) -> int:
    """Serve until the engine process sends CLOSE or is gone. Returns the exit code. Raises StartupError."""
    engine, counts = RemoteEngine(config.engine.max_pending_tokens), CountedCalls()
    await asyncio.get_running_loop().create_unix_connection(lambda: engine.link, sock=sock)
    desk = RemoteDesk(engine, limited=config.tenants_file is not None)
    server = Server(config, lambda *_: engine, counts=counts, desk=desk)
    await server.listen()
    engine.link.send(pack_json(Kind.LISTENING, None))
    tasks = [
        asyncio.create_task(each)
        for each in (_load(server, engine), _drain(server, engine), _count(counts, engine), _beat(server, engine))
    ]
    dead = await engine.closing
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    counts.send(engine)
    server.health.close()
    # Before CLOSE the engine has sent the end of every stream, except where this front end was too slow to take it.
    engine.fail_streams(EngineDead("the engine failed") if dead else Draining("the server is shutting down"))
    if dead:
        await server.die()
    else:
        # Handlers still write their last statuses, and count them; the counts are sent before the connection closes.
        await server.tracker.wait_idle(STATUS_FLUSH_SECONDS)
        counts.send(engine)
        await server.close()
    # Here too: a server that has not loaded knows of no engine that it could stop, and the connection was there before.
    await engine.stop()
    return EXIT_ENGINE_GONE if dead else 0


async def _load(server: Server, engine: RemoteEngine) -> None:
    with contextlib.suppress(EngineDead):  # `engine.closing` is done then, and `serve` ends
        await server.load()
        engine.link.send(pack_json(Kind.SERVING, None))


async def _drain(server: Server, engine: RemoteEngine) -> None:
    await engine.draining.wait()
    server.refuse_readiness()
    await engine.leaving.wait()
    server.turn_away(server.config.drain_grace)


async def _count(counts: CountedCalls, engine: RemoteEngine) -> None:
    while True:
        await asyncio.sleep(COUNTS_SECONDS)
        # On a full connection the sums wait here, where they take no more room.
        if not engine.link.full:
            counts.send(engine)


async def _beat(server: Server, engine: RemoteEngine) -> None:
    """Send BEAT to show that this loop runs, and refuse calls while the engine's process is silent."""
    silence = Silence(lambda: engine.link.heard, time.monotonic())
    while True:
        await asyncio.sleep(PERIOD)
        if not engine.link.full:
            engine.link.send(pack(Kind.BEAT))
        silent = silence.look(time.monotonic())
        server.heard(alive=silent <= DEAD_SECONDS, ready=silent <= STALE_SECONDS)


def main() -> None:
    """Run the process: read the settings from standard input, serve, exit."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    config = read_config(sys.stdin.read())
    configure(config.log_level)
    try:
        code = asyncio.run(serve(config, socket.socket(fileno=int(sys.argv[1]))))
    except StartupError as error:
        log.error("a front end cannot start: %s", error.message)
        code = error.exit_code
    logging.shutdown()
    # Not `sys.exit`: a thread that is stuck must not keep this process alive.
    os._exit(code)


if __name__ == "__main__":
    main()
