"""Runs the process in which a constraint is compiled for the first time, and kills it when that takes too much."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

from core.engine.grammar.bounded_work import TookTooLong, within
from core.errors import RequestFailed
from core.sampling.grammar.vocabulary import Vocabulary
from core.types.constraint import Constraint

START_SECONDS = 60.0
"""Seconds within which a new process must be ready."""
MEMORY_BYTES = 1 << 29
"""Address space that the process may take beyond what it has once it is ready; 512 MiB."""

NO_PROCESS = "the process that compiles constraints cannot be started"

PATHS = (str(Path(__file__).resolve().parents[3]), *(path for path in sys.path if path))
"""Where this process found its modules: the other one must find the same, whatever directory it runs in."""


Answer = dict[str, Any] | None
"""What the process answers to one question; None if it ended instead."""


class TrialFailed(Exception):
    """The constraint is refused. The text says why, and may quote the library."""


class GrammarTrial:
    """One process, started when first needed and again after it was killed. One question at a time.

    The work of one question is bounded in CPU time of the process. The clock goes on while a loaded machine has no core
    for a process of low priority, so it bounds only the wait for the answer, and a wait that ends so is not held
    against the constraint.
    """

    def __init__(self, backend: str, vocabulary: Vocabulary, seconds: float) -> None:
        """`seconds`: CPU time that one question may take."""
        self._backend = backend
        self._vocabulary = vocabulary
        self._seconds = seconds
        self._process: asyncio.subprocess.Process | None = None

    async def examine(self, constraint: Constraint) -> int:
        """Compile `constraint` in the process; returns the bytes by which the grammar let it grow.

        Raises TrialFailed when the constraint is refused, RequestFailed when the process ends before it is ready, and
        Overloaded when the process got no core for its work.
        """
        process = await self._running()
        question = {"kind": constraint.kind.value, "source": constraint.source}
        try:
            asked = asyncio.ensure_future(self._ask(process, question))
            answer = await within(asked, lambda: cpu_seconds(process.pid), self._seconds)
        except TookTooLong:
            await self.close()
            raise TrialFailed(f"takes longer than {self._seconds:g} s to compile") from None
        except BaseException:
            # Also when cancelled: a late answer would be taken for that of the next question.
            await self.close()
            raise
        if answer is None:
            await self.close()
            raise TrialFailed("takes too much memory to compile")
        if "error" in answer:
            raise TrialFailed(f"cannot be served: {_printable(answer['error'])}")
        return int(answer["bytes"])

    async def close(self) -> None:
        """Kill the process, whatever it is doing. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()

    async def _running(self) -> asyncio.subprocess.Process:
        if self._process is not None and self._process.returncode is None:
            return self._process
        self._process = process = await _started()
        setup = {
            "backend": self._backend,
            "vocabulary": dataclasses.asdict(self._vocabulary),
            "memory_bytes": MEMORY_BYTES,
        }
        try:
            answer = await asyncio.wait_for(self._ask(process, setup), START_SECONDS)
        except TimeoutError:
            answer = None
        except BaseException:
            await self.close()
            raise
        if answer is None:
            await self.close()
            raise RequestFailed(NO_PROCESS)
        return process

    @staticmethod
    async def _ask(process: asyncio.subprocess.Process, message: dict[str, Any]) -> Answer:
        """Send `message` as one line; returns the answer, or None when the process died instead."""
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(message).encode() + b"\n")
            await process.stdin.drain()
            line = await process.stdout.readline()
        except (BrokenPipeError, ConnectionResetError):
            return None
        answer: Answer = json.loads(line) if line else None
        return answer


async def _started() -> asyncio.subprocess.Process:
    """A new process. Raises RequestFailed where the machine has no room for one."""
    try:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            "core.sampling.grammar.trial",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(PATHS), "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"},
            # Ctrl-C at the terminal is for the server, which drains first.
            start_new_session=True,
        )
    except OSError as error:
        raise RequestFailed(NO_PROCESS) from error


def cpu_seconds(pid: int) -> float:
    """Seconds of CPU time that process `pid` has used so far, in all its threads; 0 for one that is gone."""
    try:
        # Split behind the name, which may hold spaces and parentheses. User and system time, fields 14 and 15 of the
        # line, are then at 11 and 12.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _printable(text: str) -> str:
    """At most 80 characters of the first line of `text`, without control characters and the slashes of paths."""
    line = (text.strip().splitlines() or ["unknown"])[0]
    return "".join(char for char in line if char.isprintable() and char not in "/\\")[:80]
