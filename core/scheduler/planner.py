"""Plans one step from host state: which rows decode, which prompts are computed, which requests give way."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch

from core.batch.build import Segment, StepPlan, build_batch
from core.batch.grammar_batch import GrammarSeed
from core.batch.result import Published
from core.batch.schedule_batch import HistoryWrites, ScheduleBatch
from core.batch.spec_plan import NO_DRAFTS, SpecPlan, TextSeed
from core.config import SchedulerConfig
from core.errors import Overloaded
from core.memory.host_moves import CopyBack
from core.sampling.uniform import origin
from core.scheduler.draft_depth import Depth
from core.scheduler.fair_share import Tenant
from core.scheduler.holdings import Holdings
from core.scheduler.lifecycle import Lifecycle
from core.scheduler.light_steps import LightSteps
from core.scheduler.microbatches import Microbatches
from core.scheduler.outputs import Ending
from core.scheduler.policy import Policy
from core.scheduler.preemption import MIN_TOKENS, Preemption
from core.scheduler.prefill_adder import PrefillAdder
from core.scheduler.sampling_table import SamplingTable
from core.scheduler.turns import Turns
from core.types.arrays import Bools, Ints
from core.types.request import Req


@dataclass(frozen=True, slots=True)
class Decodes:
    """Rows that decode in one step, and the most drafts that each verifies; int64[n] both."""

    rows: Ints
    drafts: Ints

    def __len__(self) -> int:
        return len(self.rows)

    def without(self, rows: Iterable[int]) -> Decodes:
        """Those whose rows are not among `rows`."""
        stays = ~np.isin(self.rows, list(rows))
        return Decodes(self.rows[stays], self.drafts[stays])

    def beside(self, rows: list[int]) -> Decodes:
        """These, and `rows` behind them, without drafts."""
        return Decodes(np.append(self.rows, rows), np.append(self.drafts, np.zeros(len(rows), np.int64)))

    def plain(self) -> Decodes:
        """The same rows without drafts."""
        return Decodes(self.rows, np.zeros_like(self.drafts))


NO_DECODES = Decodes(np.empty(0, np.int64), np.empty(0, np.int64))


class Planner:
    """Owns no requests: reads the running set, takes pages, and has `Lifecycle` admit, retract and end requests."""

    def __init__(
        self,
        config: SchedulerConfig,
        policy: Policy,
        lifecycle: Lifecycle,
        sampling: SamplingTable,
        pin: Callable[[list[Ints]], torch.Tensor],
        lengths: Callable[[int], Published | None],
        depth: Depth | None = None,
        stages: int = 1,
    ) -> None:
        """`depth`: which drafts a step verifies; None where speculation is off. `lengths`: see `Executor`.

        `stages`: ranks of a pipeline, among whose steps rows are dealt out.
        """
        self._config = config
        self._policy = policy
        self._lifecycle = lifecycle
        self._running = lifecycle.running
        self._memory = lifecycle.memory
        self._sampling = sampling
        self._rejoining = lifecycle.rejoining
        self._shares = lifecycle.shares
        self._holdings = Holdings(self._shares, self._running, self._memory, policy)
        self._adder = PrefillAdder(lifecycle, Preemption(config, lifecycle, self._holdings), self._holdings)
        self._turns = Turns()
        self._microbatches = Microbatches(stages, self._memory.rows.size + 1)
        self._in_flight = 0
        self._light_steps = LightSteps(self._shares, self._running, lifecycle.waiting, config.prompt_tokens)
        self._pin = pin
        self._depth = depth
        self._aim = NO_DRAFTS
        """What the step before proposed, at most."""
        self._next_step = 1
        self._lengths = lengths
        self._verifying = 0
        """The step planned last, if it may verify drafts; else 0."""

    def plan(self, now: float, *, after_idle: bool, slow: bool, in_flight: int) -> ScheduleBatch | None:
        """The next step, frozen; None where no row has work that fits.

        `in_flight`: steps that are submitted and not done.
        `now`: seconds of the loop's clock. `after_idle`: as in `ScheduleBatch`. `slow`: recent steps were long, so
        tenants with little work may have a step to themselves.
        """
        self._in_flight = in_flight
        if not self._config.mixed_chunk:
            segments, decodes = self._separate(now)
        elif slow and self._shares.contended:
            segments, decodes = self._shared(now)
        else:
            segments, decodes = self._mixed(now)
        if not segments and len(decodes) == 0:
            return None
        return self._freeze(segments, decodes, after_idle)

    def _shared(self, now: float) -> tuple[list[Segment], Decodes]:
        """The chunks and decodes of a step for tenants with little work, or of one for all tenants."""
        light = self._light_steps.tenants()
        if light is not None:
            segments, decodes = self._mixed(now, light)
            if segments or len(decodes):
                return segments, decodes
            self._light_steps.abandoned()
        return self._mixed(now)

    def _mixed(self, now: float, only: list[Tenant] | None = None) -> tuple[list[Segment], Decodes]:
        decodes = self._secure_decode(only)
        segments = self._adder.fill(self._config.prompt_tokens, now, only)
        if self._adder.vacated:
            # `fill` took these rows from requests that were to decode; another request may own them by now.
            decodes = decodes.without(self._adder.vacated)
        if self._adder.rejoined:
            decodes = decodes.beside(self._adder.rejoined)
            self._shares.generated(np.array(self._adder.rejoined, np.int64))
        # Beside a prompt each token more makes a long step longer: what is computed there is no longer free.
        return segments, decodes.plain() if segments else decodes

    def _separate(self, now: float) -> tuple[list[Segment], Decodes]:
        """Chunks and decodes, one of them empty: chunks first, except where `Turns` owes decodes a step."""
        ready = len(self._running.decoding()) > 0
        decodes = self._secure_decode() if ready and self._turns.decode_owed else NO_DECODES
        segments = [] if len(decodes) else self._adder.fill(self._config.prompt_tokens, now)
        if (ready or self._adder.rejoined) and not segments and len(decodes) == 0:
            decodes = self._secure_decode()
        self._turns.took(prefill=bool(segments), ready=ready)
        return segments, decodes

    def _secure_decode(self, only: list[Tenant] | None = None) -> Decodes:
        """Rows that decode in this step, each with pages for its tokens. Retracts requests until they fit.

        Drafts go first where pages are short: none is worth a retraction. A row that is short only if drafts in flight
        prove right waits for their result.
        """
        rows = self._ready(only)
        if self._aim.most and len(rows):
            drafts = self._drafts(rows)
            if np.count_nonzero(drafts) and self._cover(rows, drafts):
                self._shares.generated(rows)
                return Decodes(rows, drafts)
        while len(rows):
            short = self._memory.needs_page(rows, self._running.planned[rows])
            if self._memory.grow(rows[short]):
                break
            if len(fewer := self._without_those_that_wait(rows, short)) < len(rows):
                rows = fewer
                continue
            unsure = short & (self._running.planned[rows] > self._running.planned_lower[rows])
            if unsure.any():
                rows = rows if self._resolve() else rows[~unsure]
                continue
            self._give_way()
            rows = self._ready(only)
        self._shares.generated(rows)
        return Decodes(rows, np.zeros(len(rows), np.int64))

    def _drafts(self, rows: Ints) -> Ints:
        """int64[n]: the most drafts that each of `rows`, int64[n >= 1], verifies in this step."""
        running, budget = self._running, self._config.prompt_tokens // len(rows) - 1
        if (held := self._memory.draft_room) is not None:
            budget = min(budget, held // len(rows))
        most = min(self._aim.most, budget)
        # Behind the last token of a request there is nothing to verify.
        room = running.limit[rows] - running.planned_lower[rows] - 1
        wanted: Ints = np.where(running.speculates[rows], np.maximum(np.minimum(room, most), 0), 0)
        return wanted

    def _cover(self, rows: Ints, drafts: Ints) -> bool:
        """Whether each of `rows` has, or got, pages for all that it may compute with `drafts`; int64[n] both."""
        ends = np.minimum(self._running.planned[rows] + drafts + 1, self._running.limit[rows])
        short = rows[self._memory.needs_page(rows, ends - 1)]
        # Asked of those that need some: most steps need none.
        if len(short) and self._memory.missing_pages(rows, ends) > self._memory.obtainable_pages:
            return False
        while len(short):
            if not self._memory.grow(short):
                return False
            short = rows[self._memory.needs_page(rows, ends - 1)]
        return True

    def _resolve(self) -> bool:
        """Learn how far the step in flight came with its drafts, if it has published that. Else the loop is woken then.

        Asked only where a row has to wait otherwise: nothing is planned later for it.
        """
        running, step = self._running, self._verifying
        if step <= running.resolved or (found := self._lengths(step)) is None:
            return False
        current = self._memory.rows.is_current(found.rows, found.generations)
        running.resolve(step, found.rows[current], found.counts[current], found.planned[current])
        return True

    def _without_those_that_wait(self, rows: Ints, short: Bools) -> Ints:
        """`rows`, int64[n], without the youngest `short` ones, bool[n], where leased pages will do for these.

        What a request gives up may come back only when a transfer is over. To retract one more until then, and one
        more, would empty the pool for nothing.
        """
        memory, needed = self._memory, int(np.count_nonzero(short))
        if not (coming := memory.leases.coming) or needed > memory.obtainable_pages + coming:
            return rows
        return np.delete(rows, np.flatnonzero(short)[memory.obtainable_pages :])

    def _ready(self, only: list[Tenant] | None) -> Ints:
        if self._verifying > self._running.resolved and self._running.waits_for_lengths():
            self._resolve()
        rows = self._microbatches.due(self._running.decoding(), self._next_step, self._in_flight)
        return rows if only is None else self._light_steps.rows_of(only, rows)

    def _give_way(self) -> None:
        """Pages ran out: retract one running request, or end it if it runs alone."""
        members = self._running.members()
        if len(members) > 1:
            settled = self._running.has_advanced(self._running.order, MIN_TOKENS)
            self._adder.retracted()
            self._lifecycle.retract(self._holdings.loser(members, settled.tolist()))
            return
        # Entry checks make this unreachable while pages are conserved; ending one request beats ending the process.
        error = Overloaded("the KV pool cannot hold this request to its end", reason="POOL_EXHAUSTED")
        self._lifecycle.end(Ending(members[0], error=error))

    def _freeze(self, segments: list[Segment], decodes: Decodes, after_idle: bool) -> ScheduleBatch:
        running, decode_rows = self._running, decodes.rows
        fresh, fresh_rows = self._lifecycle.take_fresh()
        most, least = running.planned[decode_rows], running.planned_lower[decode_rows]
        penalised = [req for req in fresh if req.params.penalised]
        plan = StepPlan(
            step_id=self._next_step,
            segments=segments,
            decode_rows=decode_rows,
            decode_lens=most,
            decode_lower=least,
            table_writes=self._memory.take_writes(),
            fresh_rows=fresh_rows,
            history_writes=HistoryWrites(
                tuple(req.row for req in penalised),
                tuple(running.ids(req.row, int(running.known[req.row])) for req in penalised),
            ),
            after_idle=after_idle,
            host_backs=self._host_backs(),
            grammar_seeds=tuple(self._seed(req) for req in fresh if req.grammar is not None),
            spec=None if self._depth is None else self._spec_plan(decodes, self._depth, fresh, most, least),
            deltas=running.deltas_of(decode_rows),
        )
        # After the plan: its lengths are a copy of those before this step.
        running.plan_decodes(decode_rows, plan.decode_counts)
        self._microbatches.planned(decode_rows, self._next_step)
        self._microbatches.planned(np.array([each.row for each in segments], np.int64), self._next_step)
        self._verifying = self._next_step if plan.spec is not None and plan.spec.verifies else 0
        self._next_step += 1
        memory = self._memory
        return build_batch(plan, memory.rows.generations, self._sampling.batch, self._pin, memory.plan_companions)

    def _host_backs(self) -> tuple[CopyBack, ...]:
        found: list[CopyBack] = []
        if self._rejoining is not None:
            found += self._rejoining.take_backs()
        for kept in (self._lifecycle.copies, self._lifecycle.taking):
            if kept is not None:
                found += kept.take_backs()
        return tuple(found)

    def _spec_plan(self, decodes: Decodes, depth: Depth, fresh: list[Req], most: Ints, least: Ints) -> SpecPlan:
        """`most`, `least`: tokens that the decode rows may have in the pools before the step, int64[n] each."""
        running = self._running
        seeds = [
            TextSeed(
                row=req.row,
                scope=req.salt,
                ids=running.ids(req.row, int(running.known[req.row])),
                origin=origin(req.seed, req.prompt_len),
            )
            for req in fresh
            if req.speculates
        ]
        self._aim = depth.aim(len(running))
        # Bytes are equal or not in a tenth of the time that numpy takes for so few numbers.
        exact = np.count_nonzero(decodes.drafts) == 0 and most.tobytes() == least.tobytes()
        return SpecPlan(decodes.drafts, running.limit[decodes.rows], self._aim, tuple(seeds), exact)

    def _seed(self, req: Req) -> GrammarSeed:
        assert req.grammar is not None
        # Not empty after a retraction: its matcher starts behind the outputs that it has already.
        outputs = self._running.ids(req.row, int(self._running.known[req.row]), req.prompt_len)
        return GrammarSeed(req.row, req.generation, req.grammar, outputs)
