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
        self._length += line.push(req)

    def remove(self, req: Req) -> None:
        """Take `req` out, wherever it stands; no-op if it does not wait."""
        line = self._lines.get(req.tenant)
        if line is None:
            return
        self._length -= line.remove(req)
        if not line:
            del self._lines[req.tenant]

    def best(self, match_len: Callable[[Req], int], tenant: str = "", *, scoring: bool = True) -> Req | None:
        """The request of `tenant` to admit next, which stays queued; None when it has none.

        Without `scoring` those are passed over whose prompts are to have log probabilities told.
        """
        line = self._lines.get(tenant)
        return None if line is None else line.best(match_len, scoring=scoring)

    def took(self, req: Req) -> None:
        """`req` was admitted: remove it, and note for older requests of its line that it passed them over."""
        self._lines[req.tenant].pass_over(req)
        self.remove(req)

    def members(self) -> list[Req]:
        """All requests here, in no particular order."""
        return [req for line in self._lines.values() for req in line.members()]


class WaitingLine:
    """One tenant's line: heaps with lazy removal. Entries of requests that left are skipped at the head.

    Requests whose prompts are to have log probabilities told have a heap of their own, so that a step which has no room
    for those finds the others without a look at them. `len` counts the waiting requests, not the entries.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._others: list[Entry] = []
        self._scoring: list[Entry] = []
        self._here: dict[int, int] = {}
        """By `id` of the request: number of its newest push. Entries of earlier pushes are skipped."""
        self._pushes = 0

    def __len__(self) -> int:
        return len(self._here)

    def __contains__(self, req: Req) -> bool:
        return id(req) in self._here

    def push(self, req: Req) -> bool:
        """Queue a new or retracted request; its key decides its place. Returns whether it did not wait already."""
        if id(req) in self._here:
            return False
        self._pushes += 1
        self._here[id(req)] = self._pushes
        heap = self._scoring if req.scores else self._others
        heapq.heappush(heap, (self.policy.key(req), self._pushes, req))
        return True

    def remove(self, req: Req) -> bool:
        """Take `req` out, wherever it stands; returns whether it waited."""
        waited = self._here.pop(id(req), None) is not None
        if len(self._others) + len(self._scoring) > 2 * len(self._here) + FEW:
            # Entries that never come to the head would else be walked past, and keep their requests alive, for ever.
            for heap in (self._others, self._scoring):
                heap[:] = filter(self._counts, heap)
                heapq.heapify(heap)
        return waited

    def best(self, match_len: Callable[[Req], int], *, scoring: bool = True) -> Req | None:
        """The request to admit next, which stays queued; None when none waits. `scoring`: as of `WaitingQueue`."""
        head = self._head(self.policy.window, scoring=scoring)
        return self.policy.choose(head, match_len) if head else None

    def _head(self, count: int, *, scoring: bool = True) -> list[Req]:
        heaps = list[list[Entry]]()
        for heap in (self._others, self._scoring) if scoring else (self._others,):
            while heap and not self._counts(heap[0]):
                heapq.heappop(heap)
            if heap:
                heaps.append(heap)
        if count == 1 and heaps:
            return [min(heap[0] for heap in heaps)[2] if len(heaps) > 1 else heaps[0][0][2]]
        return self._smallest(count, heaps)

    def _smallest(self, count: int, heaps: list[list[Entry]]) -> list[Req]:
        """The first `count` requests of `heaps`, in order, by a walk from their heads that looks at no others."""
        found = list[Req]()
        frontier = [(heap[0], 0, number) for number, heap in enumerate(heaps)]
        heapq.heapify(frontier)
        while frontier and len(found) < count:
            entry, place, number = heapq.heappop(frontier)
            if self._counts(entry):
                found.append(entry[2])
            heap = heaps[number]
            for child in range(2 * place + 1, min(2 * place + 3, len(heap))):
                heapq.heappush(frontier, (heap[child], child, number))
        return found

    def pass_over(self, req: Req) -> None:
        """`req` is admitted: note for older requests among the first `policy.window` that it passed them over."""
        for older in self._head(self.policy.window) if self.policy.window > 1 else ():
            if older is not req and older.sequence < req.sequence:
                older.passed_over += 1

    def members(self) -> list[Req]:
        """All waiting requests, in no particular order."""
        return [entry[2] for heap in (self._others, self._scoring) for entry in heap if self._counts(entry)]

    def _counts(self, entry: Entry) -> bool:
        return self._here.get(id(entry[2])) == entry[1]
