"""Holds the engine still, and changes its weights or gives its memory back while it is. Loop thread only.

SGLang and vLLM have the same for training loops: pause_generation, update_weights_from_disk, sleep. What differs here:
new weights are loaded and proved beside serving the old ones, and a request that runs meanwhile is computed again from
its tokens, so that no token ever reads keys that other weights have made.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import re
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from core.config import ModelConfig
from core.device.shortage import MEMORY_ERRORS, is_out_of_memory
from core.engine.adapters.loader import AdapterLoader
from core.engine.renewal import Loaded, Renewal
from core.engine.standstill import Hold, Standstill
from core.engine.workers import Workers
from core.errors import (
    Asleep,
    Draining,
    InvalidRequest,
    Overloaded,
    RequestFailed,
    SlipstreamError,
    StartupError,
    Unsupported,
)
from core.executor.interface import Renewable
from core.executor.step import StepRunner
from core.models.directory import directory_below
from core.scheduler.scheduler import Scheduler
from core.types.control import CONTROL_BUSY, WEIGHT_VERSION, Activity, Nap, WeightSource, WeightUpdate
from core.types.stats import EngineStats

log = logging.getLogger(__name__)

WEIGHT_MEMORY: Final = "WEIGHT_MEMORY"
"""The `reason` of Overloaded where the device has too little memory for weights or pools."""

Result = TypeVar("Result")

_PATH: Final = re.compile(r"(?<![\w:/.])/(?:[^\s/:,;'\"()]+/)*([^\s/:,;'\"()]*)")


class Served(Protocol):
    """What the engine does for its control."""

    def refuse_unless_ready(self) -> None:
        """Raises EngineDead or Draining unless the engine is READY."""
        ...

    def turn_away(self, *, ends: bool) -> None:
        """Refuse new requests from now on, and end those there are if `ends` is set; take them again if it is not."""
        ...

    def die(self, cause: BaseException) -> None:
        """End everything: what the next step would read is in doubt."""
        ...

    @property
    def live_requests(self) -> int:
        """Streams opened and not yet ended."""
        ...


class EngineControl:
    """The `Control` of `core.engine.api`. One update, sleep or wake at a time; a second is refused."""

    def __init__(
        self,
        config: ModelConfig,
        served: Served,
        scheduler: Scheduler,
        executor: Renewable,
        renewal: Renewal,
        adapters: AdapterLoader,
        wake: Callable[[], None],
    ) -> None:
        """`wake` has the scheduler step soon."""
        self._config, self._served, self._scheduler, self._executor = config, served, scheduler, executor
        self._renewal, self._adapters = renewal, adapters
        self.still = Standstill(scheduler, wake)
        self.version = config.weight_version
        """Of the weights that serve."""
        self._fetch: Callable[[str], Path] | None = None
        self._workers = Workers(1, "slipstream-weights")
        self._asleep = self._refuses = False
        self._told: Callable[[Activity], None] | None = None
        self._running: asyncio.Task[Any] | None = None
        self._updates = self._failures = 0

    @property
    def activity(self) -> Activity:
        """What the engine does for now."""
        if self._asleep:
            return Activity.ASLEEP
        if Hold.PAUSE not in self.still.holds:
            return Activity.SERVING
        return Activity.REFUSING if self._refuses else Activity.PAUSED

    def follow(self, told: Callable[[Activity], None]) -> None:
        """See `Control`."""
        self._told = told
        self._tell()

    def fetch_by(self, fetch: Callable[[str], Path]) -> None:
        """See `Control`."""
        self._fetch = fetch

    def _tell(self) -> None:
        if self._told is not None:
            self._told(self.activity)

    def add_stats(self, stats: EngineStats) -> EngineStats:
        """`stats` with what is known here. Callable from any thread; the figures may be of different moments."""
        return dataclasses.replace(
            stats,
            activity=self.activity,
            weight_version=self.version,
            weight_updates=self._updates,
            weight_update_failures=self._failures,
        )

    async def pause(self, *, ends: bool = False) -> int:
        """See `Control`."""
        self._served.refuse_unless_ready()
        self.still.hold(Hold.PAUSE)
        live, self._refuses = self._served.live_requests, ends
        self._served.turn_away(ends=ends)
        self._tell()
        await self.still.reached()
        log.info("paused: %d streams %s", live, "ended" if ends else "wait")
        return live

    async def resume(self) -> None:
        """See `Control`."""
        self._served.refuse_unless_ready()
        if self._asleep:
            raise Asleep("the engine sleeps; wake it")
        self._served.turn_away(ends=False)
        self._refuses = False
        if self.still.release(Hold.PAUSE):
            log.info("resumed: %d streams go on", self._served.live_requests)
        self._tell()

    async def update_weights(self, source: WeightSource, version: str) -> WeightUpdate:
        """See `Control`."""
        self._served.refuse_unless_ready()
        self._refuse_ranks()
        if not WEIGHT_VERSION.fullmatch(version):
            raise InvalidRequest.of("weight_version", "must be 1 to 128 characters of A-Z a-z 0-9 . _ : / @ + -")
        find = self._find(source)
        return await self._alone(self._update(find, "name" if source.name else "path", version))

    async def sleep(self) -> Nap:
        """See `Control`."""
        self._served.refuse_unless_ready()
        self._refuse_ranks()
        if self._asleep:
            return Nap(0, self._served.live_requests)
        return await self._alone(self._fall_asleep())

    async def wake(self) -> None:
        """See `Control`."""
        self._served.refuse_unless_ready()
        if self._asleep:
            await self._alone(self._wake())

    async def close(self, error: SlipstreamError) -> None:
        """End what runs or waits here with `error`. Idempotent."""
        self.still.close(error)
        self._workers.close()
        if (task := self._running) is not None:
            task.cancel()
            # What it ended with is for the caller of the update or sleep, and is not raised here.
            await asyncio.wait([task])

    async def _alone(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of `work`, which goes on to its end if the caller leaves. Raises Overloaded beside another."""
        if self._running is not None:
            work.close()
            raise Overloaded("weights are being changed, or the engine falls asleep or wakes", reason=CONTROL_BUSY)
        task = self._running = asyncio.create_task(work, name="slipstream-control")
        task.add_done_callback(self._ended)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            # `close` cancels the work. Its caller was not cancelled, so it must not seem so.
            if task.cancelled() and caller is not None and not caller.cancelling():
                raise Draining("the server is shutting down") from None
            raise

    def _refuse_ranks(self) -> None:
        if self._config.is_shared:
            name = self._config.shared_by
            raise Unsupported(f"a model that processes share ({name}) is neither exchanged nor put to sleep yet")

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running = None
        if not task.cancelled():
            # Retrieved: a caller that has left asks no more.
            task.exception()

    def _find(self, source: WeightSource) -> Callable[[], Path]:
        """What finds the directory, on another thread. Raises Unsupported where this server has no such source."""
        if source.name:
            fetch = self._fetch
            if fetch is None:
                raise Unsupported("this server was started with a directory and fetches no models by name")
            return lambda: fetch(source.name)
        if not source.path:
            raise InvalidRequest.of("path", "needs a directory, or `name` a model")
        if self._config.weights_dir is None:
            raise Unsupported("this server reads no other weights; it was started without --weights-dir")
        root = Path(self._config.weights_dir)
        return lambda: directory_below(root, source.path, "weights")

    async def _update(self, find: Callable[[], Path], field: str, version: str) -> WeightUpdate:
        try:
            began = time.monotonic()
            loaded = await self._workers.run(self._read, find, field)
            load_seconds = time.monotonic() - began
            self._served.refuse_unless_ready()
            with self.still.held(Hold.UPDATE):
                await self.still.reached()
                held = time.monotonic()
                restarted = self._scheduler.start_over()
                await self._put_in_place(loaded)
                replaced, self.version = self.version, version
            done = WeightUpdate(version, replaced, load_seconds, time.monotonic() - held, restarted)
        except BaseException:
            self._failures += 1
            raise
        self._updates += 1
        told = "weights %s serve instead of %s: loaded in %.1f s, held for %.2f s, %d requests computed again"
        log.info(told, version, replaced, load_seconds, done.held_seconds, restarted)
        return done

    def _read(self, find: Callable[[], Path], field: str) -> Loaded:
        """On the other thread: find the directory, read and prove what is in it."""
        try:
            return self._renewal.load(find())
        except (StartupError, RuntimeError, MemoryError) as error:
            if is_out_of_memory(error) or (error.__cause__ is not None and is_out_of_memory(error.__cause__)):
                told = "there is no room for the new weights beside the old ones; Sleep gives the memory of pages back"
                raise Overloaded(told, reason=WEIGHT_MEMORY) from error
            if not isinstance(error, StartupError):
                raise
            raise InvalidRequest.of(field, _without_paths(error.message)) from error

    async def _put_in_place(self, loaded: Loaded) -> None:
        """While still. Where it fails the old weights are put in place again; where they cannot be the engine ends."""
        if self._asleep:
            self._renewal.replace(loaded)
            return
        await asyncio.wrap_future(self._executor.renew(None))
        try:
            runner = await self._workers.run(self._renewal.exchange, loaded)
        except Draining:
            raise
        except Exception as error:
            log.error("the new weights cannot be put in place; the old ones go on: %s", str(error).partition("\n")[0])
            await self._renew(self._renewal.install)
            raise RequestFailed("the new weights could not be put in place; the old ones serve on") from error
        self._executor.renew(runner)
        self._read_adapters()
        # Now: how adapters are read was the last to refer to the weights of before.
        await self._workers.run(self._renewal.let_go)

    async def _renew(self, make: Callable[[], StepRunner]) -> None:
        """Go on with what `make` returns. Without it nothing can be computed any more."""
        try:
            self._executor.renew(await self._workers.run(make))
        except Exception as error:
            self._served.die(error)
            raise
        self._read_adapters()

    def _read_adapters(self) -> None:
        if (read := self._renewal.reader()) is not None:
            self._adapters.read_by(read)

    async def _fall_asleep(self) -> Nap:
        began = time.monotonic()
        self.still.hold(Hold.SLEEP)
        await self.still.reached()
        self._scheduler.start_over()
        await asyncio.wrap_future(self._executor.renew(None))
        try:
            freed = await self._workers.run(self._renewal.give_back)
        except Exception as error:
            self._served.die(error)
            raise
        self._asleep = True
        self._tell()
        live = self._served.live_requests
        log.info("asleep: %d bytes given back in %.2f s; %d streams wait", freed, time.monotonic() - began, live)
        return Nap(freed, live)

    async def _wake(self) -> None:
        began = time.monotonic()
        try:
            runner = await self._workers.run(self._renewal.wake)
        except MEMORY_ERRORS as error:
            if not is_out_of_memory(error):
                raise
            raise Overloaded("the device has too little free memory to wake", reason=WEIGHT_MEMORY) from error
        self._executor.renew(runner)
        self._read_adapters()
        self._asleep = False
        self.still.release(Hold.SLEEP)
        self._tell()
        log.info("awake after %.2f s; %d streams go on", time.monotonic() - began, self._served.live_requests)


def _without_paths(message: str) -> str:
    """`message` with the last part alone of each absolute path: directories of the operator are none of a client's."""
    return _PATH.sub(lambda found: found[1], message)
