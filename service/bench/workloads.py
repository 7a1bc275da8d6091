"""Four workloads of token ids to compare engines by: greedy, EOS does not end an output, all sizes seeded.

W1: 64 requests at once, prompts of 16 to 256 tokens, outputs of 16 to 128. W2: one at a time, 128 and 128. W3: 32 at
once behind a shared prefix of 512 tokens, 16 of their own, 32 out. W3w: the same with the prefix served once before.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Protocol

from service.bench.peer import Emit, PeerRequest

FIRST_ID = 300
"""The lowest id in prompts: ids below it are special in most vocabularies."""
NAMES = ("W1", "W2", "W3", "W3w")


class Contender(Protocol):
    """An engine that runs a workload: `Peer`, or another engine behind the same two methods."""

    def run(self, requests: Sequence[PeerRequest], emit: Emit) -> None:
        """Run all of `requests`, which arrive now; call `emit(id, token)` when a token is usable."""

    def close(self) -> None:
        """Stop the engine."""


@dataclass(frozen=True, slots=True)
class Workload:
    """`lead`: number of requests that are served before the clock starts. `together`: the others arrive at once."""

    requests: tuple[PeerRequest, ...]
    together: bool = True
    lead: int = 0


@dataclass(frozen=True, slots=True)
class Measured:
    """`rate`: output tokens per second. `ttft`, `itl`: median seconds to a first token, and between two tokens."""

    rate: float
    ttft: float
    itl: float


def _w1(ids: Callable[[int], list[int]], pick: random.Random) -> Workload:
    sizes = [(pick.randint(16, 256), pick.randint(16, 128)) for _ in range(64)]
    return Workload(tuple(PeerRequest(id=i, prompt=ids(n), max_new=m) for i, (n, m) in enumerate(sizes)))


def _w2(ids: Callable[[int], list[int]], _: random.Random) -> Workload:
    return Workload(tuple(PeerRequest(id=i, prompt=ids(128), max_new=128) for i in range(5)), together=False)


def _w3(ids: Callable[[int], list[int]], _: random.Random) -> Workload:
    prefix = ids(512)
    return Workload(tuple(PeerRequest(id=i, prompt=prefix + ids(16), max_new=32) for i in range(32)))


def _w3w(ids: Callable[[int], list[int]], _: random.Random) -> Workload:
    prefix = ids(512)
    requests = tuple(PeerRequest(id=i, prompt=prefix + ids(16), max_new=32) for i in range(33))
    return Workload(requests, lead=1)


_MAKERS = dict(zip(NAMES, (_w1, _w2, _w3, _w3w), strict=True))


def workload(name: str, vocab_size: int, round_number: int) -> Workload:
    """The workload `name`; every round has ids of its own, so that none profits from the one before."""
    pick = random.Random(f"{name} {round_number}")
    return _MAKERS[name](lambda count: [pick.randrange(FIRST_ID, vocab_size) for _ in range(count)], pick)


def measure(contender: Contender, load: Workload) -> Measured:
    """Run the workload. Raises RuntimeError if an output has another length than its request."""
    if load.lead:
        contender.run(load.requests[: load.lead], lambda *_: None)
    requests = load.requests[load.lead :]
    began: dict[int, float] = {}
    seen: dict[int, list[float]] = {request["id"]: [] for request in requests}

    def emit(request: int, _: int) -> None:
        seen[request].append(time.perf_counter())

    start = time.perf_counter()
    for group in [requests] if load.together else [(request,) for request in requests]:
        began |= dict.fromkeys((request["id"] for request in group), time.perf_counter())
        contender.run(group, emit)
    seconds = time.perf_counter() - start
    short = [r["id"] for r in requests if len(seen[r["id"]]) != r["max_new"]]
    if short:
        raise RuntimeError(f"requests {short} were answered with another number of tokens than they asked for")
    gaps = [b - a for times in seen.values() for a, b in pairwise(times)]
    first = [times[0] - began[request] for request, times in seen.items()]
    return Measured(sum(map(len, seen.values())) / seconds, median(first), median(gaps))
