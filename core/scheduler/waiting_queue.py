"""Requests that wait for a row, in policy order."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from core.scheduler.policy import Policy
from core.types.request import Req


class WaitingQueue:
    """A heap with lazy removal: whoever left is skipped when it comes to the head. Length counts who is really here."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._heap: list[tuple[tuple[int, int], int, Req]] = []
        self._here: set[int] = set()
        self._pushes = 0

    def __len__(self) -> int:
        return len(self._here)

    def __contains__(self, req: Req) -> bool:
        return id(req) in self._here

    def push(self, req: Req) -> None:
        """Queue a new or retracted request; its key decides the place."""
        if id(req) not in self._here:
            self._here.add(id(req))
            # Breaks the tie between a dropped entry and a new one of the same request.
            self._pushes += 1
            heapq.heappush(self._heap, (self.policy.key(req), self._pushes, req))

    def remove(self, req: Req) -> None:
        """Take `req` out, wherever it stands."""
        self._here.discard(id(req))

    def best(self, match_len: Callable[[Req], int]) -> Req | None:
        """The request to admit next, still queued; None when nobody waits."""
        head = self._head(self.policy.window)
        return self.policy.choose(head, match_len) if head else None

    def _head(self, count: int) -> list[Req]:
        while self._heap and id(self._heap[0][2]) not in self._here:
            heapq.heappop(self._heap)
        if not self._heap:
            return []
        if count == 1:
            return [self._heap[0][2]]
        here = [entry for entry in self._heap if id(entry[2]) in self._here]
        return [entry[2] for entry in heapq.nsmallest(count, here)]

    def took(self, req: Req) -> None:
        """`req` was admitted: remove it, and note for those before it that they were passed over."""
        for older in self._head(self.policy.window) if self.policy.window > 1 else ():
            if older is not req and older.sequence < req.sequence:
                older.passed_over += 1
        self.remove(req)

    def members(self) -> list[Req]:
        """Everyone who waits, in no particular order."""
        return list({id(req): req for _, _, req in self._heap if id(req) in self._here}.values())
