"""Fills one step with prompt chunks: first who is already in the middle of a prompt, then who waits."""

from __future__ import annotations

import math

import numpy as np

from core.batch.build import Segment
from core.scheduler.lifecycle import Lifecycle
from core.types.arrays import Ints
from core.types.request import Req

RESERVE_AFTER_RETRACTION = 0.5
RESERVE_MIN = 0.05
RESERVE_DECAY = 0.98


class PrefillAdder:
    """Keeps the share of the remaining output that admission reserves pages for.

    Reserving everything wastes the pool, because most outputs end early; reserving nothing retracts all the time. The
    share falls with every quiet step and jumps when a retraction shows that it was too low (SGLang's new-token ratio).
    """

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle
        self._running = lifecycle.running
        self._memory = lifecycle.memory
        self._reserve_share = RESERVE_MIN
        self._remaining = 0
        """Tokens that those who run may still put out; good while one step is filled."""
        self._offered: Ints = np.zeros(self._memory.rows.size + 1, np.int64)

    def retracted(self) -> None:
        """Pages ran out: reserve more from now on."""
        self._reserve_share = max(RESERVE_AFTER_RETRACTION, self._reserve_share)

    def fill(self, budget: int, now: float) -> list[Segment]:
        """Chunks of at most `budget` tokens in all, at most one per request.

        What an encoder reads counts too. It cannot be cut, so an input longer than the whole budget is the only work of
        its step beside decodes.
        """
        self._reserve_share = max(RESERVE_MIN, self._reserve_share * RESERVE_DECAY)
        segments: list[Segment] = []
        for row in self._running.prefilling().tolist():
            if budget <= 0:
                return segments
            segments.append(self._chunk(row, budget))
            budget -= segments[-1].length
        self._remaining = self._remaining_outputs()
        # Without a row nobody is looked at: under `lpm` the look alone matches many prompts.
        while budget > 0 and self._memory.rows.available:
            req = self._lifecycle.waiting.best(self._match_len)
            if req is None or (segments and req.encoder_len >= budget):
                break
            if not self._lifecycle.admit(req, self._reserve_pages(req), now):
                break
            # The last token out is never fed back, see `RunningSet.limit`.
            self._remaining += max(0, req.max_new_tokens - len(req.outputs) - 1)
            self._offered[req.row] = 0
            segments.append(self._chunk(req.row, max(1, budget - req.encoder_len), req.encoder_ids))
            budget -= segments[-1].cost
        return segments

    def _match_len(self, req: Req) -> int:
        if not req.reuses_prefix:
            return 0
        ids = req.known_ids()
        return self._memory.cache.peek(ids, len(ids) - 1, req.salt)

    def _remaining_outputs(self) -> int:
        """Tokens that those who run may still put out. Asked once a step: a newcomer adds what it brings."""
        running, rows = self._running, self._running.order
        return int((running.limit[rows] - running.known[rows]).clip(0).sum())

    def _reserve_pages(self, newcomer: Req) -> int:
        """Pages to leave for the outputs of those who run, and of the newcomer; nothing when it would run alone."""
        if len(self._running.order) == 0:
            return 0
        remaining = self._remaining + newcomer.max_new_tokens - len(newcomer.outputs)
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
