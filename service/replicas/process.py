"""One replica: `python -m service.replicas.process FD`, started by the server with one end of a socket pair.

It builds an engine and runs it for the server, and serves no port. It ends when the server says so, or is gone. It
ignores signals: the server handles them and tells its replicas what to do.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys

from prometheus_client import CollectorRegistry

from core.engine.api import Engine
from core.errors import StartupError
from core.parent import end_with_parent
from core.types.plain import to_plain
from service.calls.desk import LocalDesk
from service.checkpoints.fetching import fetch
from service.config.server_config import ServerConfig
from service.engine.builder import BuiltEngine, EngineBuilder, build_core_engine, in_daemon_thread
from service.engine.handle import EngineHandle
from service.frontends.wire import Kind
from service.metrics.rpc import RpcMetrics
from service.process.compile_caches import use_writable_caches
from service.process.logs import configure
from service.process.switch_interval import shorten_switch_interval
from service.replicas.devices import take_devices
from service.replicas.order import Order
from service.replicas.replica_host import ReplicaHost
from service.server.served_engine import stopped

log = logging.getLogger(__name__)

STATE_SECONDS = 0.1
EXIT_STOPPED, EXIT_DEAD = 0, 1


async def serve(order: Order, sock: socket.socket, build: EngineBuilder = build_core_engine) -> int:
    """Run the engine until the server stops it or is gone, or until it dies. Returns the exit code."""
    handle, gone = EngineHandle(), asyncio.Event()
    metrics = RpcMetrics(CollectorRegistry())
    host = ReplicaHost(handle, LocalDesk(handle, ServerConfig(), metrics), metrics, gone.set)
    await asyncio.get_running_loop().create_unix_connection(lambda: host.link, sock=sock)
    telling = asyncio.create_task(_tell(host, handle))
    lost = asyncio.create_task(gone.wait())
    loading = asyncio.create_task(_load(order, host, build))
    try:
        await asyncio.wait((loading, lost), return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            return EXIT_DEAD
        handle.engine = engine = loading.result()
        if order.from_hub:
            engine.control.fetch_by(fetch)
        host.follow(handle)
        # The snapshot first: with READY the server begins to send requests.
        host.tell_state(handle, 0)
        host.send(Kind.READY, to_plain(engine.model_info))
        return await _run(engine, host, lost)
    except StartupError as error:
        host.tell_failed(error)
        return error.exit_code
    finally:
        for task in (telling, lost, loading):
            task.cancel()
        host.link.close()
        if handle.engine is not None:
            await stopped(handle.engine, grace=0)


async def _load(order: Order, host: ReplicaHost, build: EngineBuilder) -> Engine:
    config, loop = order.engine_config(), asyncio.get_running_loop()

    def progress(stage: str, part: float) -> None:
        loop.call_soon_threadsafe(host.tell_loading, stage, part)

    def take_and_build() -> BuiltEngine:
        take_devices(config.executor.device, order.place, order.count, config.model.ranks)
        return build(config, progress)

    return await (await in_daemon_thread(take_and_build)).start()


async def _run(engine: Engine, host: ReplicaHost, lost: asyncio.Task[bool]) -> int:
    """Return once the server has had the engine stopped or is gone, or the engine has died."""
    died, stop = asyncio.create_task(engine.wait_dead()), asyncio.create_task(host.stopped.wait())
    try:
        await asyncio.wait((died, stop, lost), return_when=asyncio.FIRST_COMPLETED)
        if stop.done():
            return EXIT_STOPPED
        if died.done():
            log.critical("the engine failed (%s)", type(died.result()).__name__)
            host.send(Kind.CLOSE, {"dead": True})
        return EXIT_DEAD
    finally:
        died.cancel()
        stop.cancel()


async def _tell(host: ReplicaHost, handle: EngineHandle) -> None:
    """Send snapshots from the first moment: they also show that this process lives."""
    count = 0
    while True:
        host.tell_state(handle, count)
        count += 1
        await asyncio.sleep(STATE_SECONDS)


def main() -> None:
    """Run the process: read what it is told from standard input, serve, exit."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    end_with_parent()
    told = sys.stdin.read()
    if not told:
        # The server ended as it was starting this process.
        sys.exit(EXIT_DEAD)
    order = Order.read(told)
    if order.cpus:
        # Before torch is imported, which counts them.
        os.sched_setaffinity(0, order.cpus)
    configure(order.server_config().log_level, f"engine {order.place}")
    use_writable_caches(os.environ)
    shorten_switch_interval(writes=False)
    code = asyncio.run(serve(order, socket.socket(fileno=int(sys.argv[1]))))
    logging.shutdown()
    # Not `sys.exit`: a thread that is stuck must not keep this process alive.
    os._exit(code)


if __name__ == "__main__":
    main()
