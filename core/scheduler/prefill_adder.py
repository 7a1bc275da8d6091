"""Fills one step with prompt chunks: of a tenant, first requests in the middle of their prompt, then waiting ones.

Tenants take turns by the work that was done for them (`fair_share`). Where requests have classes (`priority` policy),
the class comes first within a tenant: a waiting request of a higher class is served before a prompt of a lower one goes
on. Running requests may give way to a waiting one (`preemption`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np

from core.batch.build import Segment, joined
from core.scheduler.fair_share import SEQUENCE_COST, Tenant
from core.scheduler.holdings import Holdings
from core.scheduler.lifecycle import Lifecycle
from core.scheduler.preemption import Preemption
from core.types.arrays import Ints
from core.types.request import Req

RESERVE_AFTER_RETRACTION = 0.5
"""Least share of outputs to come that pages are reserved for, after a retraction for want of pages."""
RESERVE_MIN = 0.05
"""Least value of that share at any time."""
RESERVE_DECAY = 0.98
"""Factor by which the share falls with every call of `fill`."""
SCORED_BYTES = 64 * 2**20
"""Bytes of the logits of prompt tokens whose log probabilities are told, in one step."""
LEAST_SCORED = 16
"""Such tokens that a step may have however large the vocabulary is."""
NO_ROWS: Ints = np.empty(0, np.int64)


@dataclass(slots=True, eq=False)
class Prompts:
    """What one tenant has to prefill while one step is filled."""

    tenant: Tenant
    grant: int
    """Tokens that are computed for it at most, before the counters of tenants are compared again."""
    started: deque[int]
    """Rows in the middle of their prompt, in the order in which they go on: by class, then by admission."""
    admitting: bool
    """Whether its first waiting request may still be tried in this step."""


class PrefillAdder:
    """Chooses prompt chunks, and keeps the share of outputs to come that admission reserves pages for.

    To reserve pages for all outputs wastes the pool, because most outputs end early. To reserve none leads to
    retractions all the time. The share falls with every step, and rises when a retraction shows that it was too low
    (SGLang's new-token ratio).
    """

    def __init__(self, lifecycle: Lifecycle, preemption: Preemption, holdings: Holdings) -> None:
        self._lifecycle = lifecycle
        self._preemption = preemption
        self._holdings = holdings
        self._shares = lifecycle.shares
        self._policy = lifecycle.waiting.policy
        self._running = lifecycle.running
        self._memory = lifecycle.memory
        self._reserve_share = RESERVE_MIN
        self._remaining = 0
        """Tokens that running requests may still put out; kept up to date while one step is filled, stale after it."""
        self._offered: Ints = np.zeros(self._memory.rows.size + 1, np.int64)
        """By row: tokens of its prompt that the prefix cache was offered so far."""
        self.rejoined: list[int] = []
        """Rows that the last call of `fill` gave to requests that decode at once: they come from host memory."""
        self.vacated: list[int] = []
        """Rows that the last call of `fill` took from their owners."""
        self._segments: list[Segment] = []
        self._turns: list[Prompts] = []
        self._most_scored = max(LEAST_SCORED, SCORED_BYTES // (4 * lifecycle.sampling.vocab_size))
        self._scored_left = 0
        """Prompt tokens that may still have log probabilities told in the step that is filled."""

    def retracted(self) -> None:
        """Pages ran out: reserve pages for a larger share of the outputs from now on."""
        self._reserve_share = max(RESERVE_AFTER_RETRACTION, self._reserve_share)

    def fill(self, budget: int, now: float, only: Collection[Tenant] | None = None) -> list[Segment]:
        """Chunks of at most `budget` tokens in all, at most one per request. `only`: their tenants; None for all.

        Tokens of an encoder's input count too. That input cannot be cut, nor can a `whole` prompt, so one longer than
        `budget` is the only work of its step beside decodes. `now`: seconds of the loop's clock.
        """
        self._reserve_share = max(RESERVE_MIN, self._reserve_share * RESERVE_DECAY)
        self._preemption.begin()
        self.vacated, self.rejoined = [], []
        self._scored_left = self._most_scored
        segments = self._segments = []
        self._turns = [turn for turn in self._prompts() if only is None or turn.tenant in only]
        if not self._turns:
            return segments
        self._remaining = self._remaining_outputs()
        while budget > 0 and (turn := self._next()) is not None:
            segment = self._go_on(turn, budget, now)
            if segment is None:
                self._turns.remove(turn)
                continue
            segments.append(segment)
            budget -= segments[-1].cost
        return joined(segments) if self._shares.contended else segments

    def _prompts(self) -> list[Prompts]:
        """The `Prompts` of every tenant that has a prompt to go on with or a request that waits."""
        by_tenant: dict[int, deque[int]] = {}
        rows = self._running.prefilling()
        if self._policy.classes:
            rows = rows[np.argsort(self._running.priorities[rows], kind="stable")]
        for row, column in zip(rows.tolist(), self._shares.columns_of(rows).tolist(), strict=True):
            by_tenant.setdefault(column, deque()).append(row)
        contenders = [tenant for tenant in self._shares if tenant.waits or tenant.column in by_tenant]
        grants = self._shares.begin(contenders)
        return [
            Prompts(tenant, grant, by_tenant.get(tenant.column, deque()), tenant.waits)
            for tenant, grant in zip(contenders, grants, strict=True)
        ]

    def _next(self) -> Prompts | None:
        """The tenant whose turn it is: of those that can go on, the one that was served least. None if none can."""
        if len(self._turns) > 1:
            self._turns.sort(key=lambda turn: (turn.tenant.served, turn.tenant.number))
        return next((turn for turn in self._turns if turn.started or self._may_admit(turn)), None)

    def _may_admit(self, turn: Prompts) -> bool:
        return turn.admitting and self._holdings.may_take_a_row(turn.tenant)

    def _go_on(self, turn: Prompts, budget: int, now: float) -> Segment | None:
        """A chunk for the tenant of `turn`, of a request admitted now or before; None where it has neither."""
        grant, entering, seat = min(budget, turn.grant), None, 0
        req = self._first_waiting(turn)
        while req is not None and self._rejoin(turn, req, budget, now):
            # Asked again: rows went to this tenant since its turn came.
            req = self._first_waiting(turn) if self._may_admit(turn) else None
        if req is not None and not self._rejoins(req):
            turn.admitting = self._admit(req, budget, now, alone=not self._segments)
            if turn.admitting:
                self._offered[req.row] = 0
                turn.started.appendleft(req.row)
                # At least one token: the encoder's input is read with the first chunk.
                grant = req.prompt_len if req.whole else max(1, grant - req.encoder_len)
                entering, seat = req, SEQUENCE_COST
        if (row := self._next_row(turn)) is None:
            return None
        segment = self._chunk(row, grant, entering)
        # A chunk that ends before an image leaves it to the next step: a row has one chunk in a step.
        if segment.final or (segment.length < grant and self._owner(row).images.placed):
            turn.started.remove(row)
        self._shares.charge(turn.tenant, segment.cost + seat)
        return segment

    def _next_row(self, turn: Prompts) -> int | None:
        """The first of `started` that goes on in this step; the others wait for a step that may tell more tokens."""
        if self._scored_left > 0:
            return turn.started[0] if turn.started else None
        return next((row for row in turn.started if not self._owner(row).scores), None)

    def _rejoins(self, req: Req) -> bool:
        rejoining = self._lifecycle.rejoining
        return rejoining is not None and req in rejoining

    def _rejoin(self, turn: Prompts, req: Req, budget: int, now: float) -> bool:
        """Seat `req` if it comes from host memory; False if it does not come from there, or does not fit."""
        if not (turn.admitting and self._rejoins(req)):
            return False
        turn.admitting = self._admit(req, budget, now, alone=not self._segments)
        if turn.admitting:
            self.rejoined.append(req.row)
            self._shares.charge(turn.tenant, SEQUENCE_COST)
        return turn.admitting

    def _first_waiting(self, turn: Prompts) -> Req | None:
        """The tenant's waiting request to try now; None if there is none, or one of `started` goes before it."""
        started = self._next_row(turn)
        if not self._policy.classes:
            # Without a free row no request is looked at: under `lpm` the look alone matches many prompts.
            if started is not None or not (self._memory.rows.available or self._preemption.might(turn.tenant)):
                return None
            return self._best(turn.tenant)
        req = self._best(turn.tenant) if self._may_admit(turn) else None
        if req is None or (started is not None and req.priority >= self._running.priorities[started]):
            return None
        return req

    def _best(self, tenant: Tenant) -> Req | None:
        return self._lifecycle.waiting.best(self._match_len, tenant.name, scoring=self._scored_left > 0)

    def _admit(self, req: Req, budget: int, now: float, *, alone: bool) -> bool:
        """Seat a waiting request, in the place of running ones if need be; False if it does not fit (yet).

        `alone`: the step holds no chunk so far.
        """
        if not alone and (req.encoder_len >= budget or (req.whole and req.prompt_len > budget)):
            return False
        seated = self._memory.rows.available > 0 and self._lifecycle.admit(req, self._reserve_pages(req), now)
        if not seated and (self._comes(req) or not self._make_way(req, now)):
            self._shares.tenant(req).refused = True
            return False
        # One less: the last token out is never fed back, so it needs no place in a page.
        self._remaining += max(0, req.max_new_tokens - len(req.outputs) - 1)
        return True

    def _comes(self, req: Req) -> bool:
        """Whether `req`, which was refused, fits once transfers are over, so that no request need give way to it."""
        if not (self._memory.leases.coming and self._memory.rows.available):
            return False
        return self._lifecycle.would_admit(req, self._reserve_pages(req), NO_ROWS) is not None

    def _make_way(self, req: Req, now: float) -> bool:
        """Seat `req` in the place of running requests; False if none give way, or too few of them in this plan.

        `retracted` is not called: no pages ran out, so the reserve stays as it is.
        """
        places = self._preemption.places(req, self._reserve_pages, (each.row for each in self._segments))
        if not places.losers:
            return False
        rows = np.fromiter((loser.row for loser in places.losers), np.int64, len(places.losers))
        self._remaining -= self._left_of(rows)
        self.vacated += rows.tolist()
        for turn in self._turns:
            # A request that gives way may be in the middle of its prompt.
            turn.started = deque(row for row in turn.started if row not in rows)
        for loser in places.losers:
            self._lifecycle.preempt(loser, req)
        return places.at_most is not None and self._lifecycle.admit(req, self._reserve_pages(req), now, places.at_most)

    def _match_len(self, req: Req) -> int:
        if not req.reuses_prefix:
            return 0
        ids, copies = req.images.keyed(req.known_ids()), self._lifecycle.copies
        found = self._memory.cache.peek(ids, len(ids) - 1, req.salt)
        return found if copies is None else max(found, copies.peek(ids, len(ids) - 1, req.salt))

    def _remaining_outputs(self) -> int:
        """Tokens that running requests may still put out. Counted once a step; `_admit` adds those of a newcomer."""
        return self._left_of(self._running.order)

    def _left_of(self, rows: Ints) -> int:
        running = self._running
        return int(np.maximum(running.limit[rows] - running.known[rows], 0).sum())

    def _reserve_pages(self, newcomer: Req, leaving: Ints = NO_ROWS) -> int:
        """Pages to leave free for outputs of `newcomer` and of running requests without the owners of rows `leaving`.

        0 when `newcomer` would run alone.
        """
        if len(self._running.order) == len(leaving):
            return 0
        remaining = self._remaining + newcomer.max_new_tokens - len(newcomer.outputs)
        if len(leaving):
            remaining -= self._left_of(leaving)
        return math.ceil(remaining * self._reserve_share / self._memory.page_size)

    def _chunk(self, row: int, budget: int, entering: Req | None) -> Segment:
        """Plan at most `budget` more tokens of the prompt in `row`, and offer the prompt so far to the prefix cache.

        `entering`: its owner, if this is its first chunk since it was admitted.
        """
        running, req = self._running, self._owner(row)
        start, end = int(running.planned[row]), int(running.prefill_end[row])
        if req.scores:
            budget = min(budget, self._scored_left)
        stop = req.images.cut(start, min(end, start + budget))
        running.plan_prompt(row, stop)
        self._offer(row, stop, final=stop == end)
        ids = running.ids(row, stop, start)
        read = (None, None) if entering is None else (entering.encoder_ids, entering.encoder_features)
        segment = Segment(row, start, ids, stop == end, req.pooling, *read)
        if req.images.placed:
            segment = replace(segment, images=req.images.within(start, stop), places=req.images.places_of(start, stop))
        return self._scored(segment, req) if req.scores else segment

    def _owner(self, row: int) -> Req:
        req: Req | None = self._running.reqs[row]
        assert req is not None, "a row of the set has an owner"
        return req

    def _scored(self, segment: Segment, req: Req) -> Segment:
        """`segment` with the prompt tokens behind its own; the last token of the prompt has none."""
        self._scored_left -= segment.length
        end = min(segment.start + segment.length, req.prompt_len - 1)
        targets = self._running.ids(segment.row, end + 1, segment.start + 1)
        return segment if not len(targets) else replace(segment, targets=targets, top=req.params.prompt_logprobs or 0)

    def _offer(self, row: int, planned: int, *, final: bool) -> None:
        """Offer the first `planned` tokens of `row` to the prefix cache, at doubling lengths and at the prompt's end.

        Each offer walks from the root of the tree. Doubling keeps all offers of one prompt together at O(prompt).
        """
        if self._memory.takes(row) and (final or planned >= 2 * self._offered[row]):
            self._memory.offer(row, self._owner(row).images.keyed(self._running.ids(row, planned)))
            self._offered[row] = planned
