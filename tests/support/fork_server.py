"""Starts programs of ours without their imports: a process that has imported them once, and forks for each start.

`python -m service` takes five seconds of a core to import PyTorch, gRPC and the rest, and tests start it often.
What is forked is the whole process before its first thread, so that everything behind the imports is real: the exit
of the interpreter, signals, descriptors, memory.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache

from tests.support.repository import ROOT

MODULES = (
    "tests.chaos.serve_emulated",
    "service.cli.commands.serve",
    "service.server.server",
    "service.frontends.group",
    "service.gateway.servicer",
)
"""What servers of the tests import. Those that are missing here are imported by each."""

STREAMS = 3
LONGEST_REQUEST = 1 << 20


class ForkedProcess:
    """A started program, with the attributes of `subprocess.Popen` that tests use, in text."""

    def __init__(self, streams: Sequence[int], status: int) -> None:
        self.stdin, self.stdout, self.stderr = map(os.fdopen, streams, "wrr")
        self._status = os.fdopen(status)
        self.pid = int(self._status.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code, or the number of the signal that killed it, negative; None while it runs."""
        return self._look(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end. Raises TimeoutExpired."""
        code = self._look(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it, unless it has ended."""
        self.send_signal(signal.SIGKILL)

    def _look(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], timeout)[0]:
            self.returncode = os.waitstatus_to_exitcode(int(self._status.readline()))
            self._status.close()
        return self.returncode


class ForkServer:
    """The process with the imports; it ends with the process that made it."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                pass_fds=[theirs.fileno()],
            )

    def start(self, program: str, arguments: Sequence[str], environment: Mapping[str, str]) -> ForkedProcess:
        """Run the module `program` as `python -m` does, in the root of the repository."""
        stdin, stdout, stderr, status = (os.pipe() for _ in range(STREAMS + 1))
        theirs = [stdin[0], stdout[1], stderr[1], status[1]]
        ours = [stdin[1], stdout[0], stderr[0]]
        request = json.dumps([program, list(arguments), dict(environment)]).encode()
        socket.send_fds(self._socket, [request], theirs)
        for descriptor in theirs:
            os.close(descriptor)
        return ForkedProcess(ours, status[0])


@cache
def fork_server() -> ForkServer:
    """The one of this process, made at first use."""
    return ForkServer()


def _serve(requests: socket.socket) -> tuple[str, list[str]]:
    """Fork for each request, and return in the new process, with what it is to run; the others never return."""
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, LONGEST_REQUEST, STREAMS + 1)
        if not request:
            os._exit(0)
        if os.fork() == 0:
            requests.close()
            program, arguments, environment = json.loads(request)
            _become(descriptors, environment)
            return program, arguments
        for descriptor in descriptors:
            os.close(descriptor)
        _reap()


def _become(descriptors: Sequence[int], environment: dict[str, str]) -> None:
    """Fork again, take the standard streams and the environment; the first process stays to tell how the other ends."""
    *streams, status = descriptors
    if child := os.fork():
        for descriptor in streams:
            os.close(descriptor)
        os.write(status, f"{child}\n".encode())
        os.write(status, f"{os.waitpid(child, 0)[1]}\n".encode())
        os._exit(0)
    os.close(status)
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)


def _reap() -> None:
    """Take back the processes that only told how another ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def main() -> None:
    """Import, fork when asked, and run what was asked for as the main program of the new process."""
    for name in MODULES:
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a fork copies one thread"
    program, arguments = _serve(socket.socket(fileno=int(sys.argv[1])))
    sys.argv = [program, *arguments]
    runpy.run_module(program, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
