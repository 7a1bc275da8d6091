"""A server in a process of its own: started as an operator starts it, asked from outside, ended by signals."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from core.models.bundled import bundled_model_dir
from service.client import SlipstreamClient
from tests.chaos.device import Faults
from tests.support.fork_server import ROOT, fork_server

READY = re.compile(r"slipstream: serving \S+ on (\S+:\d+), metrics on (http://\S+) \(Ctrl-C drains\)\n")
EMULATED = "tests.chaos.serve_emulated"
START_SECONDS = 60.0
PATIENCE = 20.0
"""Seconds after which something that should have happened counts as missing."""


def started(
    program: str, arguments: Sequence[str], environment: Mapping[str, str], within: Sequence[str] = ()
) -> subprocess.Popen[str]:
    """Start a module with an interpreter of its own. `within`: a command that runs it."""
    return subprocess.Popen(
        [*within, sys.executable, "-m", program, *arguments],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _flag(name: str, value: Any) -> str:
    return f"--{name}" if value is True else f"--{name}={value}"


class ServerProcess:
    """One server with free ports; `settings` are its flags. `close` kills what still runs.

    With the program `service` it is the real one: its model is real, and it cannot be probed. `forked`: not imported
    anew; programs of the tests are, unless told otherwise. `within`: a command that runs it, and becomes it.
    """

    def __init__(
        self,
        faults: Faults | None = None,
        program: str = EMULATED,
        forked: bool | None = None,
        within: Sequence[str] = (),
        **settings: Any,
    ) -> None:
        defaults = {"model": bundled_model_dir(), "port": 0, "metrics_port": 0, "drain_linger": 0, "log_level": "error"}
        flags = [_flag(name.replace("_", "-"), value) for name, value in (defaults | settings).items()]
        environment = os.environ | (faults or Faults()).as_env() | {"OMP_NUM_THREADS": "1"}
        # A fork is quick. What the loader reads, and what imports read, takes a start.
        forked = program.startswith("tests.") if forked is None else forked
        forked = forked and "LD_PRELOAD" not in environment and not within
        start = fork_server().start if forked else partial(started, within=within)
        self.process = start(program, ["serve", *flags], environment)
        self.pid = self.process.pid
        self.errors = ""
        self._lines: queue.Queue[str] = queue.Queue()
        self._readers = [threading.Thread(target=read, daemon=True) for read in (self._read_output, self._read_errors)]
        for reader in self._readers:
            reader.start()

    def _read_output(self) -> None:
        for line in self.process.stdout:
            self._lines.put(line)

    def _read_errors(self) -> None:
        for line in self.process.stderr:
            self.errors += line

    def wait_ready(self) -> ServerProcess:
        """Block until it serves."""
        try:
            line = self._lines.get(timeout=START_SECONDS)
        except queue.Empty:
            line = "nothing"
        found = READY.fullmatch(line)
        assert found, f"said {line!r}\n{self.errors}"
        self.target, self.metrics_address = found[1], found[2]
        return self

    def client(self, **options: int) -> SlipstreamClient:
        """A client with a connection of its own; `options` are gRPC's channel arguments without their prefix."""
        given = tuple((f"grpc.{name}", value) for name, value in options.items())
        return SlipstreamClient(self.target, (("grpc.use_local_subchannel_pool", 1), *given))

    @property
    def port(self) -> int:
        """The gRPC port."""
        return int(self.target.rpartition(":")[2])

    async def probe(self) -> Inside:
        """What the inside says of itself, and what the system says of the process."""
        self.process.stdin.write("?\n")
        self.process.stdin.flush()
        facts = json.loads(await asyncio.to_thread(self._lines.get, timeout=PATIENCE))
        return Inside(**facts, files=len(os.listdir(f"/proc/{self.pid}/fd")), rss=self._rss())

    def _rss(self) -> int:
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGESIZE")

    async def metrics(self) -> dict[str, float]:
        """Every series of one scrape, spelled as in the text format."""

        def scrape() -> str:
            with urllib.request.urlopen(self.metrics_address, timeout=PATIENCE) as response:
                return str(response.read().decode())

        lines = (await asyncio.to_thread(scrape)).splitlines()
        samples = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        return {series: float(value) for series, _, value in samples}

    def send(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    async def exit_code(self, within: float) -> tuple[int, float]:
        """Its exit code and the seconds from now to then; fails past `within`."""
        before = time.monotonic()
        code = await asyncio.to_thread(self.process.wait, within)
        return code, time.monotonic() - before

    def close(self) -> None:
        """Kill it if it still runs, and take the pipes back."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for reader in self._readers:
            reader.join()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            pipe.close()


@dataclass(frozen=True)
class Inside:
    """One moment of a server. `files` and `rss` (bytes) are the process's; the rest is the engine's own view."""

    tasks: int
    threads: int
    live: int
    running: int
    waiting: int
    step: int
    used: dict[str, int]
    unsound: str
    files: int
    rss: int

    @property
    def idle(self) -> bool:
        """Nothing is held for anybody."""
        return not (self.live or self.running or self.waiting or any(self.used.values()))


async def settled(
    server: ServerProcess, baseline: Inside | None = None, within: float = PATIENCE
) -> tuple[Inside, float]:
    """Ask until nothing is held and, if given, tasks and files are back at `baseline`; the seconds that took."""
    before = time.monotonic()
    end = before + within
    while True:
        now = await server.probe()
        seconds = time.monotonic() - before
        back = baseline is None or (now.tasks <= baseline.tasks and now.files <= baseline.files)
        if now.idle and back:
            assert not now.unsound, now.unsound
            return now, seconds
        assert time.monotonic() < end, f"not settled within {within:g} s: {now}, baseline {baseline}"
        await asyncio.sleep(0.01)
