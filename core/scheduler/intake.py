"""Commands from outside, applied at the start of a step and nowhere else."""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable

from core.errors import DeadlinePassed, QueueTimeout
from core.scheduler.outputs import Ending
from core.types.request import Req, RequestState

FEW = 64
"""Instants of ended requests are swept out once they outnumber by this the most that live ones can have, two each."""


class Intake:
    """A queue of additions and endings. `drain` takes only what is queued when it begins, as trio's entry queue does.

    Also keeps the instants at which requests expire, so that no step looks through all requests. A request is kept here
    until it ends, not until its instant passes: a prompt of a thousand tokens is 12 KiB, and a deadline may be hours
    away.
    """

    def __init__(self) -> None:
        self._commands: deque[Req | Ending] = deque()
        self.arriving: Counter[str] = Counter()
        """By tenant: how many requests are queued for addition."""
        self._sequence = 0
        self._expiries: list[tuple[float, int]] = []
        """A heap of (instant, arrival number), at most two per request. Those of ended requests are skipped."""
        self._expiring: dict[int, Req] = {}
        """By arrival number: requests that may expire and have not ended."""

    def __len__(self) -> int:
        return len(self._commands)

    def members(self) -> list[Req]:
        """Requests queued for addition."""
        return [command for command in self._commands if isinstance(command, Req)]

    def add(self, req: Req) -> None:
        """Queue a new request, and set `req.sequence`: arrival order is the order of these calls."""
        self._sequence += 1
        req.sequence = self._sequence
        self._commands.append(req)
        self.arriving[req.tenant] += 1

    def end(self, command: Ending) -> None:
        """Queue an ending: a client's abort, a stop string, a slow reader."""
        self._commands.append(command)

    def drain(self, admit: Callable[[Req], None], end: Callable[[Ending], None]) -> None:
        """Call `admit` or `end` for each command that is queued now, in order."""
        self.arriving.clear()
        for _ in range(len(self._commands)):
            command = self._commands.popleft()
            if isinstance(command, Ending):
                end(command)
                continue
            for instant in (command.deadline, command.queue_deadline):
                if instant is not None:
                    self._expiring[command.sequence] = command
                    heapq.heappush(self._expiries, (instant, command.sequence))
            admit(command)

    def expired(self, now: float) -> list[Ending]:
        """Endings due at `now`, in seconds of the loop's clock.

        A request ends at its deadline in any state, and at its queue deadline only if it never had a row.
        """
        due: list[Ending] = []
        while self._expiries and self._expiries[0][0] <= now:
            req = self._expiring.get(heapq.heappop(self._expiries)[1])
            if req is None or req.state is RequestState.FINISHED:
                continue
            if req.deadline is not None and req.deadline <= now:
                due.append(Ending(req, error=DeadlinePassed("the deadline passed before the output was complete")))
            elif req.scheduled_at is None:
                due.append(Ending(req, error=QueueTimeout("waited longer than queue_timeout; the server is busy")))
        return due

    def forget(self, req: Req) -> None:
        """Drop `req`, which has ended. Amortised O(1): a sweep drops at least half of the instants."""
        if self._expiring.pop(req.sequence, None) is None:
            return
        if len(self._expiries) > 4 * len(self._expiring) + FEW:
            self._expiries = [entry for entry in self._expiries if entry[1] in self._expiring]
            heapq.heapify(self._expiries)

    def next_expiry(self) -> float | None:
        """The earliest instant at which a live request may expire, for the loop's sleep; None if none may."""
        while self._expiries and self._expiries[0][1] not in self._expiring:
            heapq.heappop(self._expiries)
        return self._expiries[0][0] if self._expiries else None
