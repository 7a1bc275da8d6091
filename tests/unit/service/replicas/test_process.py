"""The process of a replica: started as the system starts it, told what to do, ended with its server."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from typing import Any

import psutil
import pytest

from core.errors import ModelLoadError, StartupError
from service.config.server_config import ServerConfig
from service.config.sources import values_of
from service.process import child
from service.replicas.order import Order
from service.replicas.process import EXIT_DEAD, EXIT_STOPPED, serve
from service.replicas.replica_engine import ReplicaEngine
from service.replicas.spawned import Spawned, spawn
from tests.support.fakes.fake_engine import FakeEngine
from tests.support.until import PATIENCE, until
from tests.support.within import within

ORDER = Order(values_of(ServerConfig.of(model="/nowhere", log_level="error")), 1, 2)


class Served:
    """A replica of a fake engine in this process, and the server's end of the connection."""

    def __init__(self, engine: FakeEngine) -> None:
        self.fake = engine
        self.loading: list[tuple[str, float]] = []
        self.engine = ReplicaEngine(100, lambda stage, part: self.loading.append((stage, part)))

    async def start(self, failing: StartupError | None = None) -> asyncio.Task[int]:
        """The task that serves; its result is the exit code."""

        def build(_config: Any, progress: Any) -> Any:
            progress("weights", 0.25)
            if failing is not None:
                raise failing
            return self.fake

        ours, theirs = socket.socketpair()
        await asyncio.get_running_loop().create_unix_connection(lambda: self.engine.link, sock=ours)
        return asyncio.create_task(serve(ORDER, theirs, build))


async def test_it_ends_with_its_server() -> None:
    served = Served(FakeEngine())
    task = await served.start()
    assert await served.engine.started() and served.loading == [("weights", 0.25)]
    served.engine.link.close()
    async with within(PATIENCE, "it ends"):
        assert await task == EXIT_DEAD
    assert served.fake.stopped == 1


async def test_it_ends_when_it_is_told() -> None:
    served = Served(FakeEngine())
    task = await served.start()
    assert await served.engine.started()
    await served.engine.leave()
    assert await asyncio.wait_for(task, PATIENCE) == EXIT_STOPPED


async def test_it_ends_with_its_engine_and_says_so() -> None:
    served = Served(FakeEngine())
    task = await served.start()
    assert await served.engine.started()
    served.fake.kill(RuntimeError("a step failed"))
    assert await asyncio.wait_for(served.engine.closing, PATIENCE) is True
    assert await asyncio.wait_for(task, PATIENCE) == EXIT_DEAD


async def test_why_it_cannot_start_is_told_with_its_kind() -> None:
    served = Served(FakeEngine())
    told = ModelLoadError("no weights")
    told.exit_code = 9
    task = await served.start(told)
    with pytest.raises(ModelLoadError, match="no weights") as failed:
        await served.engine.started()
    assert failed.value.exit_code == 9 == await asyncio.wait_for(task, PATIENCE)
    assert not served.engine.is_ready


async def test_a_server_that_goes_while_it_loads_is_not_waited_for() -> None:
    gate, served = asyncio.Event(), Served(FakeEngine())

    async def never() -> Any:
        await gate.wait()

    served.fake.start = never  # type: ignore[method-assign, assignment]
    task = await served.start()
    served.engine.link.close()
    assert await asyncio.wait_for(task, PATIENCE) == EXIT_DEAD


async def spawned(order: Order) -> tuple[Spawned, ReplicaEngine, list[tuple[str, float]]]:
    told: list[tuple[str, float]] = []
    engine = ReplicaEngine(100, lambda stage, part: told.append((stage, part)))
    ours, theirs = socket.socketpair()
    await asyncio.get_running_loop().create_unix_connection(lambda: engine.link, sock=ours)
    with theirs:
        return await spawn(order, theirs), engine, told


async def test_a_process_ends_when_it_is_killed() -> None:
    process, engine, _ = await spawned(ORDER)
    assert psutil.Process(process.pid).ppid() == psutil.Process().pid
    process.kill()
    assert await asyncio.wait_for(process.wait(), PATIENCE) == -signal.SIGKILL == process.returncode
    process.kill()
    engine.link.close()


async def test_a_process_says_why_it_cannot_start() -> None:
    process, engine, _ = await spawned(ORDER)
    with pytest.raises(ModelLoadError, match="/nowhere"):
        await asyncio.wait_for(engine.started(), 3 * PATIENCE)
    assert await asyncio.wait_for(process.wait(), PATIENCE) == 3


def test_it_imports_what_this_process_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/a:/b")
    assert child.environment()["PYTHONPATH"] == f"{child.ROOT}:/a:/b"
    monkeypatch.delenv("PYTHONPATH")
    assert child.environment()["PYTHONPATH"] == str(child.ROOT)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can")
async def test_a_stopped_process_ends_with_its_parent() -> None:
    """A grandchild that asked for it, and was stopped, as its parent is killed."""
    code = (
        "import os, signal, subprocess, sys, time\n"
        "inner = 'from core.parent import end_with_parent; import os, signal; end_with_parent(); "
        "print(os.getpid(), flush=True); os.kill(os.getpid(), signal.SIGSTOP)'\n"
        "subprocess.Popen([sys.executable, '-c', inner])\n"
        "time.sleep(600)\n"
    )
    parent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", code), stdout=asyncio.subprocess.PIPE, env=child.environment()
    )
    assert parent.stdout is not None
    inner = psutil.Process(int(await asyncio.wait_for(parent.stdout.readline(), PATIENCE)))
    while inner.status() != psutil.STATUS_STOPPED:
        await asyncio.sleep(0.01)
    parent.kill()
    try:
        await until(lambda: not inner.is_running() or inner.status() == psutil.STATUS_ZOMBIE)
    finally:
        # It has the pipe, which is waited for.
        with contextlib.suppress(psutil.NoSuchProcess):
            inner.kill()
        await parent.wait()
