"""Requests that wait for a row, in policy order."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from core.scheduler.policy import Policy
from core.types.request import Req

Entry = tuple[tuple[int, int], int, Req]
"""Key, number of the push, request."""

FEW = 64
"""Entries of requests that left are swept out when they are this many more than those who are here."""


class WaitingQueue:
    """A heap with lazy removal: whoever left is skipped when it comes to the head. Length counts who is really here."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._heap: list[Entry] = []
        # By request, the number of the push that counts: entries of earlier ones are dropped like those of who left.
        self._here: dict[int, int] = {}
        self._pushes = 0

    def __len__(self) -> int:
        return len(self._here)

    def __contains__(self, req: Req) -> bool:
        return id(req) in self._here

    def push(self, req: Req) -> None:
        """Queue a new or retracted request; its key decides the place."""
        if id(req) not in self._here:
            self._pushes += 1
            self._here[id(req)] = self._pushes
            heapq.heappush(self._heap, (self.policy.key(req), self._pushes, req))

    def remove(self, req: Req) -> None:
        """Take `req` out, wherever it stands."""
        self._here.pop(id(req), None)
        if len(self._heap) > 2 * len(self._here) + FEW:
            # Who left without having come to the head would else be walked past, and kept alive, for ever.
            self._heap = list(filter(self._counts, self._heap))
            heapq.heapify(self._heap)

    def best(self, match_len: Callable[[Req], int]) -> Req | None:
        """The request to admit next, still queued; None when nobody waits."""
        head = self._head(self.policy.window)
        return self.policy.choose(head, match_len) if head else None

    def _head(self, count: int) -> list[Req]:
        while self._heap and not self._counts(self._heap[0]):
            heapq.heappop(self._heap)
        if not self._heap:
            return []
        if count == 1:
            return [self._heap[0][2]]
        return self._smallest(count)

    def _smallest(self, count: int) -> list[Req]:
        """The first `count` of the heap, in order, by a walk from its head: nobody looks at all who wait."""
        heap, found = self._heap, list[Req]()
        frontier = [(heap[0], 0)]
        while frontier and len(found) < count:
            entry, place = heapq.heappop(frontier)
            if self._counts(entry):
                found.append(entry[2])
            for child in range(2 * place + 1, min(2 * place + 3, len(heap))):
                heapq.heappush(frontier, (heap[child], child))
        return found

    def took(self, req: Req) -> None:
        """`req` was admitted: remove it, and note for those before it that they were passed over."""
        for older in self._head(self.policy.window) if self.policy.window > 1 else ():
            if older is not req and older.sequence < req.sequence:
                older.passed_over += 1
        self.remove(req)

    def members(self) -> list[Req]:
        """Everyone who waits, in no particular order."""
        return [entry[2] for entry in self._heap if self._counts(entry)]

    def _counts(self, entry: Entry) -> bool:
        return self._here.get(id(entry[2])) == entry[1]
