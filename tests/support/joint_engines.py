"""Engines that share experts, each in a process of its own, as a server has them; tests tell each what to do."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import multiprocessing
import socket
from collections.abc import Callable, Coroutine, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Final

from core.config import EngineConfig
from core.distributed.meeting import HOST
from core.engine.async_engine import AsyncEngine
from core.engine.build import build_engine
from core.errors import SlipstreamError
from core.model_config import Peers

SECONDS: Final = 120.0
"""In which an engine answers."""

Work = Callable[..., Coroutine[Any, Any, Any]]
"""Called with an engine, and what else is told with it; of a module, since another process runs it."""


def _run(config: EngineConfig, peers: Peers, listener: socket.socket | None, told: Connection) -> None:
    peers = dataclasses.replace(peers, listener=None if listener is None else listener.detach())
    model = dataclasses.replace(config.model, peers=peers, native="off")
    asyncio.run(_serve(dataclasses.replace(config, model=model), told))


async def _serve(config: EngineConfig, told: Connection) -> None:
    try:
        engine: AsyncEngine = await build_engine(config).start()
    except SlipstreamError as error:
        told.send(error)
        return
    told.send(None)
    while (order := await asyncio.to_thread(told.recv)) is not None:
        work, given = order
        try:
            told.send(await work(engine, *given))
        except SlipstreamError as error:
            told.send(error)
    await engine.stop()


class JointEngine:
    """One of them, as a test knows it."""

    def __init__(self, process: BaseProcess, told: Connection) -> None:
        self.process = process
        self._told = told

    def begin(self, work: Work, *given: Any) -> None:
        """Have it run `work`; see `end`."""
        self._told.send((work, given))

    def end(self) -> Any:
        """What `work` has returned. Raises what it has raised, if that is one of our errors."""
        assert self._told.poll(SECONDS), f"{self.process.name} says nothing"
        try:
            found = self._told.recv()
        except EOFError:
            raise AssertionError(f"{self.process.name} has ended") from None
        if isinstance(found, SlipstreamError):
            raise found
        return found

    def do(self, work: Work, *given: Any) -> Any:
        """What it makes of `work`."""
        self.begin(work, *given)
        return self.end()

    def stop(self) -> None:
        """Have it end; see `JointEngine.process`."""
        self._told.send(None)


@contextlib.contextmanager
def joint_engines(*configs: EngineConfig) -> Iterator[list[JointEngine]]:
    """One engine for each of `configs`, all of which serve; stopped together. Raises what keeps one from it."""
    spawning = multiprocessing.get_context("spawn")
    engines: list[JointEngine] = []
    try:
        with socket.create_server((HOST, 0)) as listener:
            for rank, config in enumerate(configs):
                ours, theirs = multiprocessing.Pipe()
                peers = Peers(rank, len(configs), listener.getsockname()[1])
                given = (config, peers, None if rank else listener, theirs)
                process = spawning.Process(target=_run, args=given, name=f"engine {rank}", daemon=True)
                process.start()
                theirs.close()
                engines.append(JointEngine(process, ours))
        for each in engines:
            each.end()
        yield engines
        for each in engines:
            each.stop()
        for each in engines:
            each.process.join(SECONDS)
            assert each.process.exitcode == 0, (each.process.name, each.process.exitcode)
    finally:
        for each in engines:
            each.process.kill()
            each.process.join()
