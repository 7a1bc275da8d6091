"""Starts the process of a replica."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process, create_subprocess_exec
from collections.abc import Awaitable, Callable
from typing import Protocol

from service.process.child import environment
from service.replicas.order import Order


class ReplicaProcess(Protocol):
    """A process that runs a replica."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None:
        """Its exit code, or the negative number of the signal that ended it; None while it runs."""
        ...

    def kill(self) -> None: ...

    async def wait(self) -> int: ...


Spawn = Callable[[Order, socket.socket], Awaitable[ReplicaProcess]]
"""Starts a process that carries out an order over its end of a socket pair."""


class Spawned:
    """A `ReplicaProcess` of the system's."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.pid = process.pid

    @property
    def returncode(self) -> int | None:
        """See `ReplicaProcess`."""
        return self._process.returncode

    def kill(self) -> None:
        """End it at once, with SIGKILL."""
        # Not `Process.kill`, which may take the exit code away from the loop's own watcher.
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    async def wait(self) -> int:
        """Return its exit code once it has ended."""
        return await self._process.wait()


async def spawn(order: Order, sock: socket.socket) -> Spawned:
    """Start `service.replicas.process`. Raises OSError where the system has no process left."""
    process = await create_subprocess_exec(
        *(sys.executable, "-P", "-m", "service.replicas.process", str(sock.fileno())),
        stdin=PIPE,
        pass_fds=(sock.fileno(), *(() if order.listener is None else (order.listener,))),
        env=environment(),
        # What a terminal sends to all processes is the server's to handle, also while this one imports.
        start_new_session=True,
    )
    assert process.stdin is not None
    process.stdin.write(order.write())
    process.stdin.close()
    return Spawned(process)
