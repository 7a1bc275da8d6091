"""One replica: a process with an engine, started, watched, and started again when it ends."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Final

from core.engine.api import EngineState
from core.errors import EngineDead, SlipstreamError, StartupError
from core.types.io import ModelInfo
from core.types.stats import EngineStats
from service.frontends.heartbeat import PERIOD, STALE_SECONDS, Silence
from service.replicas.merged_stats import counted, merged
from service.replicas.order import Order
from service.replicas.replica_engine import ReplicaEngine
from service.replicas.spawned import ReplicaProcess, Spawn

log = logging.getLogger(__name__)

DEAD_SECONDS = 30.0
"""Seconds of silence after which a replica is killed: a wrong kill loses streams, and requests went elsewhere long
before."""
START_SECONDS = 120.0
"""The same while it loads, when imports hold up its event loop."""
LEAVE_SECONDS = 8.0
"""Seconds that a replica has to end once it was told to."""
FIRST_BACKOFF, LONGEST_BACKOFF, LONG_ENOUGH = 0.1, 30.0, 60.0
"""Seconds before a replica is started again: FIRST_BACKOFF, doubled with each further end up to LONGEST_BACKOFF; after
one that served for LONG_ENOUGH seconds it is FIRST_BACKOFF again."""
LOOK_SECONDS: Final = PERIOD
"""Seconds between two calls of `Replica.look`."""
EXIT_ENGINE_DEAD: Final = 1


class Replica:
    """The process at one place. `engine` changes with every start.

    `make(place)` makes its engine. `failed`: whether its last start failed. `on_change` is called whenever it comes,
    goes or falls silent; `on_end(place)` when its process has ended after it was started once.
    `works`: whether all that it needs beside its process is there. Event-loop thread only.
    """

    def __init__(
        self,
        order: Order,
        spawn: Spawn,
        make: Callable[[int], ReplicaEngine],
        on_change: Callable[[], None],
        on_end: Callable[[int], None] = lambda place: None,
        works: Callable[[], bool] = lambda: True,
    ) -> None:
        self.place, self.order = order.place, order
        self.engine = make(order.place)
        self.restarts = 0
        self.model_info: ModelInfo
        """Of the model, once it was started."""
        self.failed = self.silent = self._up = False
        self.serving = False
        """Whether it has been started and has not ended."""
        self._spawn, self._make, self._on_change, self._on_end = spawn, make, on_change, on_end
        self._works = works
        self._process: ReplicaProcess | None = None
        self._silence = Silence(lambda: self.engine.link.heard, time.monotonic())
        self.past = EngineStats()
        """What its processes before have counted."""
        self._since = 0.0

    @property
    def ready(self) -> bool:
        """Whether it is sent requests: it serves, and was heard of lately."""
        return self.serving and not self.silent and self.engine.is_ready and self._works()

    @property
    def alive(self) -> bool:
        """Whether it has started and has not ended, as far as is known now."""
        return self._up and self.engine.state is not EngineState.DEAD

    async def start(self) -> None:
        """Start the process and wait until it can serve. Raises StartupError, and then nothing runs."""
        engine = self.engine = self._make(self.place)
        self._silence, self.silent, self._up = Silence(lambda: engine.link.heard, time.monotonic()), False, False
        try:
            await self._connect(engine)
            if not await engine.started():
                raise await self._ended()
        except OSError as error:
            await self.end()
            raise StartupError(f"an engine's process cannot be started: {error.strerror or error}") from error
        except BaseException:
            await self.end()
            raise
        self.model_info, self._up = engine.model_info, True
        self._since = time.monotonic()

    async def _connect(self, engine: ReplicaEngine) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                await asyncio.get_running_loop().create_unix_connection(lambda: engine.link, sock=ours)
            except BaseException:
                ours.close()
                raise
            self._process = await self._spawn(self.order, theirs)

    async def _ended(self) -> StartupError:
        """What to say of a process that ended before it could serve, and said nothing itself."""
        # The connection may have ended alone: then the process serves nothing any more.
        self.kill()
        code = 0 if self._process is None else await self._process.wait()
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        error = StartupError(f"the process of engine {self.place} {how} before it could serve")
        error.exit_code = EXIT_ENGINE_DEAD
        return error

    def serve(self) -> None:
        """Be sent requests from now on."""
        self.serving, self.failed = True, False
        if self.restarts:
            log.info("engine %d serves again", self.place)
        self._on_change()

    def kill(self) -> None:
        """End the process by force, if it runs."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def end(self) -> None:
        """End the process at once, if it runs, and wait for it. Its streams end with EngineDead."""
        self.kill()
        if self._process is not None:
            await self._process.wait()
        self.engine.link.close()

    async def leave(self) -> None:
        """Have the engine stop and the process end, within LEAVE_SECONDS; what does not, or is silent, is ended."""
        try:
            if self.alive and not self.silent:
                async with asyncio.timeout(LEAVE_SECONDS):
                    await self.engine.leave()
                    if self._process is not None:
                        await self._process.wait()
        except (TimeoutError, SlipstreamError) as error:
            log.error("engine %d did not end by itself (%s)", self.place, type(error).__name__)
        finally:
            await self.end()

    def look(self, now: float) -> None:
        """Take note of the silence of the process at `now`; kill it after DEAD_SECONDS."""
        silent = self._silence.look(now)
        was, self.silent = self.silent, self._up and silent > STALE_SECONDS
        if was is not self.silent:
            log.warning("engine %d %s", self.place, "is silent" if self.silent else "is heard again")
            if self.silent:
                self.engine.hush()
            self._on_change()
        if silent > (DEAD_SECONDS if self._up else START_SECONDS):
            log.error("engine %d has said nothing for %.0f seconds; it is killed", self.place, silent)
            self.kill()

    async def keep(self, begin: Callable[[Replica], Awaitable[None]]) -> None:
        """Start the process again whenever it ends. `begin` starts it, and does again what was done to all replicas."""
        backoff = FIRST_BACKOFF
        while True:
            await asyncio.wait((self.engine.closing,))
            self.lose()
            await self.end()
            if time.monotonic() - self._since > LONG_ENOUGH:
                backoff = FIRST_BACKOFF
            while not self.serving:
                await asyncio.sleep(backoff)
                backoff = min(2 * backoff, LONGEST_BACKOFF)
                await self._again(begin)

    def lose(self) -> None:
        """Take note that the process has ended; what it counted stays."""
        log.error("engine %d has ended; its streams are lost, another one starts", self.place)
        self.serving = self.silent = self._up = False
        self.engine.fail_streams(EngineDead("the engine failed"))
        self.past = merged([counted(self.engine.stats)], self.past)
        self._on_end(self.place)
        self._on_change()

    async def _again(self, begin: Callable[[Replica], Awaitable[None]]) -> None:
        self.restarts += 1
        self.failed = False
        try:
            await begin(self)
        except Exception as error:
            known = isinstance(error, SlipstreamError)
            log.error("engine %d cannot be started again: %s", self.place, error, exc_info=None if known else error)
            await self.end()
            self.failed = True
            self._on_end(self.place)
            self._on_change()
