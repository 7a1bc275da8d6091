"""Starts programs of ours without their imports: a process that has imported them once, and forks for each start.

`python -m service` takes five seconds of a core to import PyTorch, gRPC and the rest, and tests start it often. What is
forked is the whole process before its first thread, so that what follows the imports is real: threads, descriptors,
memory, signals, the exit of the interpreter.

What is settled before is that of the fork server: variables that the loader and the interpreter read (`start` refuses
other values), limits, the umask, the seed of `hash`, the command line in `/proc`. Tests of those start it themselves.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import cache

from tests.support.repository import ROOT

MODULES = (
    "core.engine.build",
    "service.bench.emulated",
    "service.cli.commands.serve",
    "service.server.server",
    "service.frontends.group",
    "service.gateway.servicer",
    "tests.chaos.device",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.configuration_llama",
    "transformers.tokenization_utils_tokenizers",
)
"""What servers of the tests import. Those that are missing here are imported by each. `transformers` imports the last
three when it reads the first tokenizer: nine hundred modules, and three seconds of each server."""
SETTLED = ("LD_", "PYTHON", "MALLOC_", "OMP_")
"""Beginnings of variables that are read before the fork, and never again."""
SETTINGS = {name: value for name, value in os.environ.items() if not name.startswith("LD_")} | {"OMP_NUM_THREADS": "1"}

STREAMS = 3
LONGEST_REQUEST = 1 << 17
"""Bytes; more does not fit into one message of such a socket."""
PR_SET_PDEATHSIG = 1
HARMLESS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals of a terminal or a process group, which are for the server and not for the process that waits for it."""


class ForkedProcess:
    """A started program, with the attributes of `subprocess.Popen` that tests use, in text."""

    def __init__(self, streams: Sequence[int], status: int) -> None:
        self.stdin, self.stdout, self.stderr = map(os.fdopen, streams, "wrr")
        self._status = os.fdopen(status)
        told = self._status.readline()
        if not told:
            raise RuntimeError("the fork server is gone; what it said is on standard error")
        self.pid = int(told)
        self.returncode: int | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._watch, name=f"end-of-{self.pid}", daemon=True).start()

    def poll(self) -> int | None:
        """Its exit code, or the number of the signal that killed it, negative; None while it runs."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end. Raises TimeoutExpired."""
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            # It may have ended since.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it, unless it has ended."""
        self.send_signal(signal.SIGKILL)

    def _watch(self) -> None:
        with self._status as status:
            told = status.readline()
        # Without a word the process that waited for it was killed, and it with that one.
        self.returncode = int(told) if told else -signal.SIGKILL
        self._ended.set()


class ForkServer:
    """The process with the imports; it ends with the process that made it."""

    def __init__(self, modules: Sequence[str] = MODULES) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno()), *modules],
                cwd=ROOT,
                env=SETTINGS,
                pass_fds=[theirs.fileno()],
            )

    def start(self, program: str, arguments: Sequence[str], environment: Mapping[str, str]) -> ForkedProcess:
        """Run the module `program` as `python -m` does, in the root of the repository.

        Raises ValueError for variables that could not take effect any more.
        """
        late = [name for name in {*environment, *SETTINGS} if name.startswith(SETTLED)]
        if late := sorted(name for name in late if environment.get(name) != SETTINGS.get(name)):
            raise ValueError(f"read before the fork, so start the program itself: {', '.join(late)}")
        stdin, stdout, stderr, status = (os.pipe() for _ in range(STREAMS + 1))
        theirs = [stdin[0], stdout[1], stderr[1], status[1]]
        ours = [stdin[1], stdout[0], stderr[0]]
        request = json.dumps([program, list(arguments), dict(environment)]).encode()
        try:
            socket.send_fds(self._socket, [request], theirs)
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        return ForkedProcess(ours, status[0])

    def close(self) -> None:
        """End it; programs that it started are killed."""
        self._socket.close()
        self._process.wait()


@cache
def fork_server() -> ForkServer:
    """The one of this process, made at first use. Workers forked later share it: a request is one message."""
    return ForkServer()


def _serve(requests: socket.socket) -> tuple[str, list[str]]:
    """Fork for each request, and return in the new process, with what it is to run; the others never return."""
    ours = os.getpid()
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, LONGEST_REQUEST, STREAMS + 1)
        if not request:
            os._exit(0)
        if os.fork() == 0:
            requests.close()
            program, arguments, environment = json.loads(request)
            end_with(ours)
            _become(descriptors, environment)
            return program, arguments
        for descriptor in descriptors:
            os.close(descriptor)
        _reap()


def _become(descriptors: Sequence[int], environment: dict[str, str]) -> None:
    """Fork again, take the standard streams and the environment; the first process stays to tell how the other ends."""
    *streams, status = descriptors
    waiting = os.getpid()
    if child := os.fork():
        try:
            _wait_for(child, streams, status)
        finally:
            os._exit(0)
    end_with(waiting)
    os.close(status)
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)


def _wait_for(child: int, streams: Sequence[int], status: int) -> None:
    """Tell the number of the process `child`, and when it has ended how; keep nothing open that others wait for."""
    for number in HARMLESS:
        signal.signal(number, signal.SIG_IGN)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(STREAMS):
        os.dup2(nothing, number)
    for descriptor in streams:
        os.close(descriptor)
    os.write(status, f"{child}\n".encode())
    # Told before the number is free for another process.
    ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert ended is not None
    code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
    os.write(status, f"{code}\n".encode())


def end_with(parent: int) -> None:
    """Be killed when `parent`, which forked this process, ends: a run of tests that is killed leaves no server."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        # It ended before, and nothing would be told of that any more.
        os._exit(1)


def _reap() -> None:
    """Take back the processes that only told how another ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def main() -> None:
    """Import, fork when asked, and run what was asked for as the main program of the new process."""
    for name in sys.argv[2:]:
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a fork copies one thread"
    # The interpreter collects as it ends, which would look at each object, and so copy each page: a second of a core.
    gc.collect()
    gc.freeze()
    program, arguments = _serve(socket.socket(fileno=int(sys.argv[1])))
    sys.argv = [program, *arguments]
    runpy.run_module(program, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
