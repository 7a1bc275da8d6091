"""From start to exit code: signals, the engine's death, and the order in which a server ends."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from typing import Any

from service.frontends.group import FrontEndGroup
from service.server.server import Server

log = logging.getLogger(__name__)

EXIT_DRAINED = 0
EXIT_ENGINE_DEAD = 1
EXIT_BY_SIGNAL = 128
"""Exit code, plus the signal's number, if a second signal cuts the drain short."""


Served = Server | FrontEndGroup
"""A server of one process, or of several."""


class StopSignals:
    """SIGTERM, SIGINT and SIGHUP as futures: the first signal asks for a drain, the second for an end at once.

    A terminal sends SIGHUP as it closes. If SIGHUP is ignored at the start, as `nohup` has it, it stays ignored.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        hang_up = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
        self._heeded = (signal.SIGTERM, signal.SIGINT, *hang_up)
        self.first: asyncio.Future[signal.Signals] = self._loop.create_future()
        self.second: asyncio.Future[signal.Signals] = self._loop.create_future()

    def __enter__(self) -> StopSignals:
        for number in self._heeded:
            self._loop.add_signal_handler(number, self.received, number)
        return self

    def __exit__(self, *_: object) -> None:
        for number in self._heeded:
            self._loop.remove_signal_handler(number)

    def received(self, number: signal.Signals) -> None:
        """Record one signal; any after the second changes nothing."""
        waiting = next((future for future in (self.first, self.second) if not future.done()), None)
        if waiting is not None:
            waiting.set_result(number)


async def run(server: Served, announce: Callable[[Served], None]) -> int:
    """Serve until a signal or the engine's death. Returns the exit code. Calls `announce` once the server is ready.

    Raises StartupError.
    """
    with StopSignals() as signals:
        await server.listen()
        loading = asyncio.create_task(server.load())
        await _first_of(loading, signals.first)
        if not loading.done():
            loading.cancel()
            await server.close(grace=0)
            return EXIT_DRAINED
        try:
            loading.result()
        except BaseException:
            await server.close(grace=0)
            raise
        announce(server)
        return await _serve(server, signals)


async def _serve(server: Served, signals: StopSignals) -> int:
    died = asyncio.create_task(server.engine.wait_dead())
    try:
        await _first_of(died, signals.first)
        if died.done():
            return await _die(server, died.result())
        return await _drain(server, signals, died)
    finally:
        died.cancel()


async def _drain(server: Served, signals: StopSignals, died: asyncio.Task[BaseException]) -> int:
    """Drain, unless the engine dies or a second signal comes first."""
    number = signals.first.result()
    # SIGINT comes from a terminal, where no load balancer has to learn of the drain first.
    linger = 0.0 if number is signal.SIGINT else server.config.drain_linger
    log.info("%s: draining, %d streams live", number.name, server.engine.live_requests)
    draining = asyncio.create_task(server.drain(linger, server.config.drain_grace))
    await _first_of(draining, died, signals.second)
    if draining.done() and not draining.exception():
        log.info("drained, %d streams cut", draining.result())
        return EXIT_DRAINED
    draining.cancel()
    await _first_of(draining)
    if died.done():
        return await _die(server, died.result())
    if not signals.second.done():
        return await _die(server, draining.exception() or asyncio.CancelledError())
    log.warning("%s: stopping at once", signals.second.result().name)
    await server.close(grace=0)
    return EXIT_BY_SIGNAL + signals.second.result()


async def _first_of(*futures: asyncio.Future[Any]) -> None:
    """Return once one of `futures` is done. Cancels none of them."""
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


async def _die(server: Served, cause: BaseException) -> int:
    log.critical("the engine failed (%s); exiting", type(cause).__name__)
    await server.die()
    return EXIT_ENGINE_DEAD
