"""Builds the production scheduler over the hash executor and plays requests through it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from core.config import SchedulerConfig
from core.errors import SlipstreamError
from core.memory.companion import Companion
from core.memory.kv_allocator import PagedKVAllocator
from core.memory.request_memory import RequestMemory
from core.memory.rows import RowAllocator
from core.prefix.registry import build_prefix_cache
from core.scheduler.outputs import Ending, StepOutputs
from core.scheduler.pace import Pace
from core.scheduler.scheduler import Scheduler
from core.types.io import FinishReason
from core.types.request import Req
from core.types.sampling_params import SamplingParams
from tests.support.fakes.fixed_depth import FixedDepth
from tests.support.fakes.hash_executor import HashExecutor, pin, reference

VOCAB = 64
EOS = 63
OWN = ("priority", "deadline", "queue_deadline", "tenant", "weight", "speculative", "images")
"""Fields of a request that are no sampling parameters."""


@dataclass
class Seen:
    """What a client of one request saw."""

    tokens: list[int] = field(default_factory=list)
    reason: FinishReason | None = None
    error: SlipstreamError | None = None
    terminals: int = 0
    matched_stop: str | int | None = None


class Harness:
    """A scheduler with `rows` rows and `pages` pages; time is a number of steps.

    `drafts`: how many a step verifies; None without speculation.
    """

    def __init__(
        self,
        *,
        rows: int = 8,
        pages: int = 64,
        page_size: int = 4,
        max_len: int = 128,
        cache: str = "radix",
        depth: int = 2,
        companions: Sequence[Companion] = (),
        executor: type[HashExecutor] = HashExecutor,
        long_seconds: float = math.inf,
        drafts: int | None = None,
        **config: object,
    ) -> None:
        settings = {"chunked_prefill_size": 16, **config}
        allocator = PagedKVAllocator(pages, page_size)
        prefixes = build_prefix_cache(cache, page_size)
        self.memory = RequestMemory(RowAllocator(rows), allocator, prefixes, max_len, companions)
        self.executor = executor(rows + 1, max_len + page_size, (pages + 1) * page_size, VOCAB, depth)
        self.scheduler = Scheduler(
            SchedulerConfig(**settings),  # type: ignore[arg-type]
            self.memory,
            self.executor,
            self._emit,
            max_len=max_len,
            vocab_size=VOCAB,
            eos_ids=(EOS,),
            pin=pin,
            pace=Pace(long_seconds),
            depth=None if drafts is None else FixedDepth(drafts),
        )
        self.seen: dict[Req, Seen] = {}
        self.now = 0.0

    def add(self, prompt: Sequence[int], max_tokens: int = 8, *, salt: str = "", **kwargs: object) -> Req:
        """Queue a request; `kwargs` go to `SamplingParams`, but for the request's own fields."""
        own = {k: kwargs.pop(k) for k in OWN if k in kwargs}
        params = SamplingParams(temperature=0.0, ignore_eos=kwargs.pop("ignore_eos", True), **kwargs)  # type: ignore[arg-type]
        salt = self.memory.cache.namespace(salt, None)
        req = Req("r", 0, np.asarray(prompt, np.int64), params, 0, max_tokens, salt=salt, arrived_at=self.now, **own)  # type: ignore[arg-type]
        self.seen[req] = Seen()
        self.scheduler.intake.add(req)
        return req

    def end(self, req: Req, reason: FinishReason = FinishReason.CANCELLED) -> None:
        self.scheduler.intake.end(Ending(req, reason=reason))

    def step(self, run: bool = True) -> bool:
        """One scheduler step, then (unless `run` is off) one device step; integrity is checked after each."""
        self.now += 1.0
        moved = self.scheduler.step(self.now)
        self.memory.check_integrity()
        assert self.executor.in_flight <= self.executor.depth
        return (self.executor.run_one() if run else False) or moved

    def drain(self, limit: int = 3000) -> int:
        """Step until nothing is left; the number of steps. Everything must be free afterwards."""
        steps = 0
        while self.scheduler.has_work:
            self.step()
            steps += 1
            assert steps < limit, "no end in sight: livelock"
        self.memory.check_integrity()
        used = {pool.name: pool.used for pool in self.memory.stats()}
        assert {"req", "kv_page"} <= set(used) and not any(used.values()), used
        return steps

    def expect(self, req: Req, count: int | None = None) -> None:
        """The request ended once with exactly the reference's tokens: all, or the first `count` if it was cut short."""
        seen = self.seen[req]
        assert seen.terminals == 1
        if count is None:
            assert seen.reason is FinishReason.LENGTH and seen.error is None
            count = req.max_new_tokens
        assert seen.tokens == reference(req.prompt.tolist(), count, VOCAB)

    def _emit(self, outputs: StepOutputs, now: float) -> None:
        for step in outputs.tokens:
            for req, token, position in zip(step.reqs, step.tokens, step.positions, strict=True):
                seen = self.seen[req]
                assert seen.terminals == 0, "a token after the terminal"
                assert position == len(seen.tokens), "positions are not contiguous"
                seen.tokens.append(token)
        for ended in outputs.ended:
            seen = self.seen[ended.req]
            seen.terminals += 1
            seen.reason, seen.error, seen.matched_stop = ended.reason, ended.error, ended.matched_stop
