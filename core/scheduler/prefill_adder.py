"""Fills one step with prompt chunks: first those in the middle of a prompt, then those that wait.

Where requests are of classes (`priority`), the class comes before that: a waiting request of a higher class is served
before a prompt of a lower one goes on, and may have running requests give way to it (`preemption`).
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np

from core.batch.build import Segment
from core.scheduler.lifecycle import Lifecycle
from core.scheduler.preemption import Preemption
from core.types.arrays import Ints
from core.types.request import Req

RESERVE_AFTER_RETRACTION = 0.5
RESERVE_MIN = 0.05
RESERVE_DECAY = 0.98
NO_ROWS: Ints = np.empty(0, np.int64)


class PrefillAdder:
    """Keeps the share of the remaining output that admission reserves pages for.

    Reserving everything wastes the pool, because most outputs end early; reserving nothing retracts all the time. The
    share falls with every quiet step and jumps when a retraction shows that it was too low (SGLang's new-token ratio).
    """

    def __init__(self, lifecycle: Lifecycle, preemption: Preemption) -> None:
        self._lifecycle = lifecycle
        self._preemption = preemption
        self._policy = lifecycle.waiting.policy
        self._running = lifecycle.running
        self._memory = lifecycle.memory
        self._reserve_share = RESERVE_MIN
        self._remaining = 0
        """Tokens that those who run may still put out; good while one step is filled."""
        self._offered: Ints = np.zeros(self._memory.rows.size + 1, np.int64)
        self.vacated: list[int] = []
        """Rows that the last call of `fill` took from their owners."""

    def retracted(self) -> None:
        """Pages ran out: reserve more from now on."""
        self._reserve_share = max(RESERVE_AFTER_RETRACTION, self._reserve_share)

    def fill(self, budget: int, now: float) -> list[Segment]:
        """Chunks of at most `budget` tokens in all, at most one per request.

        What an encoder reads counts too. It cannot be cut, so an input longer than the whole budget is the only work of
        its step beside decodes.
        """
        self._reserve_share = max(RESERVE_MIN, self._reserve_share * RESERVE_DECAY)
        self._remaining = self._remaining_outputs()
        self._preemption.begin()
        self.vacated = []
        segments: list[Segment] = []
        started, admitting = self._started(), True
        while budget > 0:
            req = self._first_waiting(started) if admitting else None
            if req is not None:
                admitting = self._admit(req, budget, now, alone=not segments)
                if self.vacated:
                    started = deque(row for row in started if row not in self.vacated)
                if not admitting:
                    continue
                self._offered[req.row] = 0
                segments.append(self._chunk(req.row, max(1, budget - req.encoder_len), req.encoder_ids))
            elif started:
                segments.append(self._chunk(started.popleft(), budget))
            else:
                break
            budget -= segments[-1].cost
        return segments

    def _started(self) -> deque[int]:
        """Rows in the middle of their prompt, in the order in which they go on: by class, then by admission."""
        rows = self._running.prefilling()
        if self._policy.classes:
            rows = rows[np.argsort(self._running.priorities[rows], kind="stable")]
        return deque(rows.tolist())

    def _first_waiting(self, started: deque[int]) -> Req | None:
        """The waiting request whose turn it is, if it is not that of the first of `started`."""
        if not self._policy.classes:
            # Without a free row no request is looked at: under `lpm` the look alone matches many prompts.
            return None if started or not self._memory.rows.available else self._best()
        req = self._best()
        if req is None or (started and req.priority >= self._running.priorities[started[0]]):
            return None
        return req

    def _best(self) -> Req | None:
        return self._lifecycle.waiting.best(self._match_len)

    def _admit(self, req: Req, budget: int, now: float, *, alone: bool) -> bool:
        """Seat a waiting request, if need be in the place of others; False, and no change, where that cannot be."""
        if not alone and req.encoder_len >= budget:
            return False
        seated = self._memory.rows.available > 0 and self._lifecycle.admit(req, self._reserve_pages(req), now)
        if not seated and not self._make_way(req, now):
            return False
        # The last token out is never fed back, see `RunningSet.limit`.
        self._remaining += max(0, req.max_new_tokens - len(req.outputs) - 1)
        return True

    def _make_way(self, req: Req, now: float) -> bool:
        """Seat `req` in the place of running requests; the reserve stays as it is, for no pages ran out."""
        losers, at_most = self._preemption.losers(req, self._reserve_pages)
        if not losers:
            return False
        rows = np.fromiter((loser.row for loser in losers), np.int64, len(losers))
        self._remaining -= self._left_of(rows)
        self.vacated += rows.tolist()
        for loser in losers:
            self._lifecycle.preempt(loser)
        return self._lifecycle.admit(req, self._reserve_pages(req), now, at_most)

    def _match_len(self, req: Req) -> int:
        if not req.reuses_prefix:
            return 0
        ids = req.known_ids()
        return self._memory.cache.peek(ids, len(ids) - 1, req.salt)

    def _remaining_outputs(self) -> int:
        """Tokens that those who run may still put out. Asked once a step: a newcomer adds what it brings."""
        return self._left_of(self._running.order)

    def _left_of(self, rows: Ints) -> int:
        running = self._running
        return int((running.limit[rows] - running.known[rows]).clip(0).sum())

    def _reserve_pages(self, newcomer: Req, leaving: Ints = NO_ROWS) -> int:
        """Pages to leave for the outputs of those who run, less the owners of rows `leaving`, and of the newcomer;
        nothing when it would run alone.
        """
        if len(self._running.order) == len(leaving):
            return 0
        remaining = self._remaining - self._left_of(leaving) + newcomer.max_new_tokens - len(newcomer.outputs)
        return math.ceil(remaining * self._reserve_share / self._memory.page_size)

    def _chunk(self, row: int, budget: int, encoder_ids: Ints | None = None) -> Segment:
        running = self._running
        start, end = int(running.planned[row]), int(running.prefill_end[row])
        stop = min(end, start + budget)
        running.planned[row] = stop
        self._offer(row, stop, final=stop == end)
        req: Req | None = running.reqs[row]
        assert req is not None, "a row of the set has an owner"
        ids = running.ids(row, stop, start)
        return Segment(row, start, ids, final=stop == end, pooling=req.pooling, encoder_ids=encoder_ids)

    def _offer(self, row: int, planned: int, *, final: bool) -> None:
        """Share what is planned so far, at doubling lengths: each offer walks from the root, all stay O(prompt)."""
        if final or planned >= 2 * self._offered[row]:
            self._memory.offer(row, self._running.ids(row, planned))
            self._offered[row] = planned
