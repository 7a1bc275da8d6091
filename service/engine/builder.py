"""How the server gets its engine: it calls core's one constructor in a thread, since reading weights takes long."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Protocol, TypeVar

from core.config import EngineConfig
from core.engine.api import Engine

Progress = Callable[[str, float], None]
"""Called with the name of a stage and the part of it that is done, 0 to 1; from any thread."""

Result = TypeVar("Result")

_THREAD = "slipstream-load"


class BuiltEngine(Protocol):
    """An engine that is loaded, and on no event loop yet. A server that lets go of it has nothing to stop."""

    async def start(self) -> Engine:
        """The engine, READY, on the running event loop. Called once. Where it fails, nothing is left to stop."""
        ...


EngineBuilder = Callable[[EngineConfig, Progress | None], BuiltEngine]


def build_core_engine(config: EngineConfig, progress: Progress | None) -> BuiltEngine:
    """The real engine. Imports the accelerator runtime, so the import waits until the ports are bound."""
    from core.engine.build import build_engine

    return build_engine(config, progress)


def left_behind() -> bool:
    """Whether work of `in_daemon_thread` goes on. At the end of a process that is work which its waiter has left."""
    return any(each.name == _THREAD for each in threading.enumerate())


async def in_daemon_thread(work: Callable[[], Result]) -> Result:
    """The result of `work()`, run in a daemon thread, which does not keep the process alive. Raises what it raises."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Result] = loop.create_future()

    def settle(result: Result | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        try:
            result, error = work(), None
        except BaseException as raised:
            result, error = None, raised
        try:
            loop.call_soon_threadsafe(settle, result, error)
        except RuntimeError:
            return  # the loop is closed: the server was told to stop while loading

    threading.Thread(target=run, name=_THREAD, daemon=True).start()
    return await done
