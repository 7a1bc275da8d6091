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


class StartableEngine(Engine, Protocol):
    """An engine that was built and has not started its thread yet."""

    async def start(self) -> None:
        """Start the forward thread and become READY. Called once, on the event loop that will use the engine."""
        ...


EngineBuilder = Callable[[EngineConfig, Progress | None], StartableEngine]


def build_core_engine(config: EngineConfig, progress: Progress | None) -> StartableEngine:
    """The real engine. Imports the accelerator runtime, so the import waits until the ports are bound."""
    from core.engine.build import build_engine

    return build_engine(config, progress)


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

    threading.Thread(target=run, name="slipstream-load", daemon=True).start()
    return await done
