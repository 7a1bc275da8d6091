"""Replicas in this process: what `service.replicas.process` runs, as tasks over real socket pairs."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from core.config import EngineConfig
from core.engine.api import Engine
from core.types.io import Delta, Finished, GenerateRequest, OutputEvent
from core.types.sampling_params import SamplingParams
from service.config.server_config import ServerConfig
from service.engine.builder import BuiltEngine
from service.replicas.builder import replicated
from service.replicas.order import Order
from service.replicas.process import serve
from service.replicas.replica_set import ReplicaSet
from tests.support.kept_server import small_engine

Make = Callable[[EngineConfig], BuiltEngine]


class InProcess:
    """A `ReplicaProcess` that is a task."""

    def __init__(self, order: Order, sock: socket.socket, build: Callable[..., BuiltEngine]) -> None:
        self.order, self.pid = order, 1000 + order.place
        self.returncode: int | None = None
        self._task = asyncio.create_task(serve(order, sock, build))
        # Left open by a task that is cancelled before its first step.
        self._task.add_done_callback(lambda _: sock.close())

    def kill(self) -> None:
        """End it as a process that is killed: whatever it was doing, the connection is gone."""
        self._task.cancel()

    async def wait(self) -> int:
        """Return once it has ended."""
        await asyncio.wait((self._task,))
        self.returncode = -9 if self._task.cancelled() else self._task.result()
        return self.returncode


@dataclass
class Rig:
    """What was started. `engines` has the engine of each place, the newest one."""

    replicas: ReplicaSet = field(init=False)
    engines: dict[int, Engine] = field(default_factory=dict)
    processes: list[InProcess] = field(default_factory=list)
    refuse: set[int] = field(default_factory=set)
    """Places at which no process can be started."""

    async def spawn(self, order: Order, sock: socket.socket) -> InProcess:
        """A process for `order`."""
        if order.place in self.refuse:
            raise OSError(11, "no process is left")
        rig = self

        class Built:
            async def start(self) -> Engine:
                rig.engines[order.place] = engine = await made.start()
                return engine

        made: BuiltEngine

        def build(config: EngineConfig, progress: Any) -> BuiltEngine:
            nonlocal made
            progress("weights", 0.5)
            made = self.make(config)
            return Built()

        self.processes.append(InProcess(order, sock.dup(), build))
        return self.processes[-1]

    make: Make = lambda config: small_engine()

    def lose(self, place: int) -> None:
        """Kill the process at `place`."""
        [process for process in self.processes if process.order.place == place][-1].kill()


@asynccontextmanager
async def replicas(count: int = 2, make: Make | None = None, **settings: Any) -> AsyncIterator[Rig]:
    """`count` replicas that serve, over the emulated device unless `make` makes others."""
    rig = Rig()
    if make is not None:
        rig.make = make
    config = ServerConfig.of(data_parallel=count, **settings)
    built = replicated(config, rig.spawn)(config.engine_config(), None)
    started = await built.start()
    assert isinstance(started, ReplicaSet)
    rig.replicas = started
    try:
        yield rig
    finally:
        await rig.replicas.stop()


def ask(ids: tuple[int, ...], tokens: int = 4, **fields: Any) -> GenerateRequest:
    """A greedy request for so many tokens."""
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, n=fields.pop("n", 1))
    return GenerateRequest(token_ids=ids, sampling=sampling, want_text=False, **fields)


async def read(replicas: Engine, request: GenerateRequest) -> list[OutputEvent]:
    """All events of a request."""
    stream = await replicas.generate(request)
    return [event async for event in stream]


def tokens(events: list[OutputEvent], index: int = 0) -> list[int]:
    """The tokens of one output."""
    deltas = (event for event in events if isinstance(event, Delta) and event.index == index)
    return [token for event in deltas for token in event.token_ids]


def ends(events: list[OutputEvent]) -> list[Finished]:
    """The ends among `events`."""
    return [event for event in events if isinstance(event, Finished)]
