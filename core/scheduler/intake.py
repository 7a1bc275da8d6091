"""Commands from outside, applied at the start of a step and nowhere else."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from core.errors import DeadlinePassed, QueueTimeout, SlipstreamError
from core.types.io import FinishReason
from core.types.request import Req, RequestState


@dataclass(frozen=True, slots=True)
class End:
    """End `req` now, wherever it is; a request that ended meanwhile is left alone."""

    req: Req
    reason: FinishReason | None = None
    matched_stop: str | int | None = None
    error: SlipstreamError | None = None


class Intake:
    """A queue of additions and endings, drained only as far as it reached on entry (trio's entry queue does the same).

    Also keeps the instants at which requests expire, so that no step looks through all of them.
    """

    def __init__(self) -> None:
        self._commands: deque[Req | End] = deque()
        self._sequence = 0
        # Entries of requests that ended are dropped when they come up; at most two per request.
        self._expiries: list[tuple[float, int, Req]] = []

    def __len__(self) -> int:
        return len(self._commands)

    def members(self) -> list[Req]:
        """Requests queued for addition."""
        return [command for command in self._commands if isinstance(command, Req)]

    def add(self, req: Req) -> None:
        """Queue a new request; arrival order is the order of these calls."""
        self._sequence += 1
        req.sequence = self._sequence
        self._commands.append(req)

    def end(self, command: End) -> None:
        """Queue an ending: a client's abort, a stop string, a slow reader."""
        self._commands.append(command)

    def drain(self, admit: Callable[[Req], None], end: Callable[[End], None]) -> None:
        """Apply what is queued now, in order."""
        for _ in range(len(self._commands)):
            command = self._commands.popleft()
            if isinstance(command, End):
                end(command)
                continue
            for instant in (command.deadline, command.queue_deadline):
                if instant is not None:
                    heapq.heappush(self._expiries, (instant, command.sequence, command))
            admit(command)

    def expired(self, now: float) -> list[End]:
        """Endings due at `now`: deadlines of anybody, queue timeouts of those never scheduled."""
        due: list[End] = []
        while self._expiries and self._expiries[0][0] <= now:
            _, _, req = heapq.heappop(self._expiries)
            if req.state is RequestState.FINISHED:
                continue
            if req.deadline is not None and req.deadline <= now:
                due.append(End(req, error=DeadlinePassed("the deadline passed before the output was complete")))
            elif req.scheduled_at is None:
                due.append(End(req, error=QueueTimeout("waited longer than queue_timeout; the server is busy")))
        return due

    def next_expiry(self) -> float | None:
        """The earliest instant at which somebody may expire, for the loop's sleep."""
        return self._expiries[0][0] if self._expiries else None
