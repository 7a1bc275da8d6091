"""Requests that wait for a row: a line per tenant, each in policy order."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable

from core.scheduler.policy import Policy
from core.types.request import Req

Entry = tuple[tuple[int, int], int, Req]
"""Key, number of the push, request."""

FEW = 64
"""Entries of requests that left are swept out when they are this many more than those who are here."""


class WaitingQueue:
    """The lines of all tenants that have a request here. Which tenant is next is not decided here (`fair_share`)."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._lines: dict[str, WaitingLine] = {}
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __contains__(self, req: Req) -> bool:
        return req.tenant in self._lines and req in self._lines[req.tenant]

    @property
    def tenants(self) -> Iterable[str]:
        """Those with a request here."""
        return self._lines

    def waiting_of(self, tenant: str) -> int:
        """How many requests of `tenant` wait."""
        return len(self._lines[tenant]) if tenant in self._lines else 0

    def tokens_of(self, tenant: str) -> int:
        """Tokens of the prompts (and outputs before they gave way) of its requests that wait. Looks at each of them."""
        if tenant not in self._lines:
            return 0
        return sum(req.prompt_len + len(req.outputs) + req.encoder_len for req in self._lines[tenant].members())

    def push(self, req: Req) -> None:
        """Queue a new or retracted request; its key decides the place in the line of its tenant."""
        line = self._lines.get(req.tenant)
        if line is None:
            line = self._lines[req.tenant] = WaitingLine(self.policy)
        self._length -= len(line)
        line.push(req)
        self._length += len(line)

    def remove(self, req: Req) -> None:
        """Take `req` out, wherever it stands."""
        line = self._lines.get(req.tenant)
        if line is None:
            return
        self._length -= len(line)
        line.remove(req)
        self._length += len(line)
        if not len(line):
            del self._lines[req.tenant]

    def best(self, match_len: Callable[[Req], int], tenant: str = "") -> Req | None:
        """The request of `tenant` to admit next, still queued; None when none of it waits."""
        line = self._lines.get(tenant)
        return None if line is None else line.best(match_len)

    def took(self, req: Req) -> None:
        """`req` was admitted: remove it, and note for those before it in its line that they were passed over."""
        self._lines[req.tenant].pass_over(req)
        self.remove(req)

    def members(self) -> list[Req]:
        """All requests here, in no particular order."""
        return [req for line in self._lines.values() for req in line.members()]


class WaitingLine:
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

    def pass_over(self, req: Req) -> None:
        """`req` is admitted: note for those before it that they were passed over."""
        for older in self._head(self.policy.window) if self.policy.window > 1 else ():
            if older is not req and older.sequence < req.sequence:
                older.passed_over += 1

    def members(self) -> list[Req]:
        """Everyone who waits, in no particular order."""
        return [entry[2] for entry in self._heap if self._counts(entry)]

    def _counts(self, entry: Entry) -> bool:
        return self._here.get(id(entry[2])) == entry[1]
