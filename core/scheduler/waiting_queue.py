"""Requests that wait for a row: one line per tenant, each in the order of the policy."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable

from core.scheduler.policy import Policy
from core.types.request import Req

Entry = tuple[tuple[int, int], int, Req]
"""(key by policy, number of the push, request)."""

FEW = 64
"""Entries of requests that left a line are swept out once they outnumber the requests in it by this many."""


class WaitingQueue:
    """One line for each tenant that has a waiting request. `fair_share` decides which tenant is next."""

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
        """Names of the tenants that have a waiting request."""
        return self._lines

    def waiting_of(self, tenant: str) -> int:
        """How many requests of `tenant` wait."""
        return len(self._lines[tenant]) if tenant in self._lines else 0

    def tokens_of(self, tenant: str) -> int:
        """Tokens of prompts, encoder inputs and outputs so far of all waiting requests of `tenant`. O(requests)."""
        if tenant not in self._lines:
            return 0
        return sum(req.prompt_len + len(req.outputs) + req.encoder_len for req in self._lines[tenant].members())

    def push(self, req: Req) -> None:
        """Queue a new or retracted request; its key decides its place in the line of its tenant."""
        line = self._lines.get(req.tenant)
        if line is None:
            line = self._lines[req.tenant] = WaitingLine(self.policy)
        self._length -= len(line)
        line.push(req)
        self._length += len(line)

    def remove(self, req: Req) -> None:
        """Take `req` out, wherever it stands; no-op if it does not wait."""
        line = self._lines.get(req.tenant)
        if line is None:
            return
        self._length -= len(line)
        line.remove(req)
        self._length += len(line)
        if not len(line):
            del self._lines[req.tenant]

    def best(self, match_len: Callable[[Req], int], tenant: str = "") -> Req | None:
        """The request of `tenant` to admit next, which stays queued; None when it has none."""
        line = self._lines.get(tenant)
        return None if line is None else line.best(match_len)

    def took(self, req: Req) -> None:
        """`req` was admitted: remove it, and note for older requests of its line that it passed them over."""
        self._lines[req.tenant].pass_over(req)
        self.remove(req)

    def members(self) -> list[Req]:
        """All requests here, in no particular order."""
        return [req for line in self._lines.values() for req in line.members()]


class WaitingLine:
    """One tenant's line: a heap with lazy removal. Entries of requests that left are skipped at the head.

    `len` counts the waiting requests, not the entries.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._heap: list[Entry] = []
        self._here: dict[int, int] = {}
        """By `id` of the request: number of its newest push. Entries of earlier pushes are skipped."""
        self._pushes = 0

    def __len__(self) -> int:
        return len(self._here)

    def __contains__(self, req: Req) -> bool:
        return id(req) in self._here

    def push(self, req: Req) -> None:
        """Queue a new or retracted request; its key decides its place. No-op if it waits already."""
        if id(req) not in self._here:
            self._pushes += 1
            self._here[id(req)] = self._pushes
            heapq.heappush(self._heap, (self.policy.key(req), self._pushes, req))

    def remove(self, req: Req) -> None:
        """Take `req` out, wherever it stands; no-op if it does not wait."""
        self._here.pop(id(req), None)
        if len(self._heap) > 2 * len(self._here) + FEW:
            # Entries that never come to the head would else be walked past, and keep their requests alive, for ever.
            self._heap = list(filter(self._counts, self._heap))
            heapq.heapify(self._heap)

    def best(self, match_len: Callable[[Req], int]) -> Req | None:
        """The request to admit next, which stays queued; None when none waits."""
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
        """The first `count` requests of the heap, in order, by a walk from its head and without a look at the rest."""
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
        """`req` is admitted: note for older requests among the first `policy.window` that it passed them over."""
        for older in self._head(self.policy.window) if self.policy.window > 1 else ():
            if older is not req and older.sequence < req.sequence:
                older.passed_over += 1

    def members(self) -> list[Req]:
        """All waiting requests, in no particular order."""
        return [entry[2] for entry in self._heap if self._counts(entry)]

    def _counts(self, entry: Entry) -> bool:
        return self._here.get(id(entry[2])) == entry[1]
