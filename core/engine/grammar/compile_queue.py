"""Constraints that wait to be compiled. Tenants take turns: one that sends many constraints waits behind its own."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict

from core.errors import Overloaded
from core.types.constraint import Constraint
from core.types.grammar import Grammar

FULL = "GRAMMAR_COMPILES"
"""The `reason` of Overloaded when a constraint cannot be compiled now."""


class CompileJob:
    """One constraint, for all calls that wait for it. `done` gets the grammar, or the error that the calls raise."""

    def __init__(self, constraint: Constraint) -> None:
        self.constraint = constraint
        self.since = time.monotonic()
        self.done: asyncio.Future[Grammar] = asyncio.get_running_loop().create_future()
        self.waiting: Counter[str] = Counter()
        """Tenant -> how many of its calls wait."""
        self.task: asyncio.Task[None] | None = None
        """The compile; None until it is the job's turn."""

    def fail(self, error: BaseException) -> None:
        """Make every call raise `error`. No-op when `done` is set already."""
        if not self.done.done():
            self.done.set_exception(error)
            self.done.exception()  # seen, even if every call has left


class CompileQueue:
    """At most `most` jobs, each in the line of every tenant that waits for it. Used on the loop thread."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lines: OrderedDict[str, OrderedDict[CompileJob, None]] = OrderedDict()
        """Tenant -> its jobs, the oldest first. Tenants are in the order of their turns."""
        self._jobs: set[CompileJob] = set()

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, job: CompileJob, tenant: str) -> None:
        """Put `job` into the line of `tenant`. Raises Overloaded when the queue is full and no job makes room.

        The newest job that is in the longest line alone makes room, if that line is longer than this one by two or
        more. Its calls raise Overloaded.
        """
        if job not in self._jobs and len(self._jobs) >= self._most:
            self._make_room(tenant)
        self._jobs.add(job)
        self._lines.setdefault(tenant, OrderedDict())[job] = None

    def leave(self, job: CompileJob, tenant: str) -> None:
        """Take `job` out of the line of `tenant`, and out of the queue when it was its last line."""
        line = self._lines.get(tenant)
        # The values of a line are all None, so `self` says that the job was not in it.
        if line is not None and line.pop(job, self) is None and not line:
            del self._lines[tenant]
        if not any(job in line for line in self._lines.values()):
            self._jobs.discard(job)

    def pop(self) -> CompileJob:
        """Remove and return the oldest job of the tenant whose turn it is. That tenant then comes last."""
        tenant, line = next(iter(self._lines.items()))
        self._lines.move_to_end(tenant)
        job = next(iter(line))
        self.remove(job)
        return job

    def remove(self, job: CompileJob) -> None:
        """Take `job` out of every line."""
        for tenant in [tenant for tenant, line in self._lines.items() if job in line]:
            self.leave(job, tenant)

    def _make_room(self, tenant: str) -> None:
        refused = Overloaded("too many constraints are being compiled", reason=FULL)
        longest = max(self._lines.values(), key=len)
        if len(longest) < len(self._lines.get(tenant, ())) + 2:
            raise refused
        own = (job for job in reversed(longest) if sum(job in line for line in self._lines.values()) == 1)
        newest = next(own, None)
        if newest is None:
            raise refused
        self.remove(newest)
        newest.fail(refused)
