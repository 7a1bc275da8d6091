"""Plans one step from host state: who decodes, who prefills, who gives way."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from core.batch.build import Segment, StepPlan, build_batch
from core.batch.schedule_batch import HistoryWrites, ScheduleBatch
from core.config import SchedulerConfig
from core.errors import Overloaded
from core.memory.companion import Writes
from core.models.lora.slots import LORA, LoraWrites, SlotWrite, group_tokens
from core.scheduler.lifecycle import Lifecycle
from core.scheduler.outputs import Ended
from core.scheduler.policy import Policy, victim
from core.scheduler.prefill_adder import PrefillAdder
from core.scheduler.sampling_table import SamplingTable
from core.types.arrays import Ints

NO_ROWS: Ints = np.empty(0, np.int64)


class Planner:
    """Owns no requests: reads the running set, takes pages, and lets the lifecycle move whoever must move."""

    def __init__(
        self,
        config: SchedulerConfig,
        policy: Policy,
        lifecycle: Lifecycle,
        sampling: SamplingTable,
        pin: Callable[[list[Ints]], torch.Tensor],
        slot_writes: Callable[[], tuple[SlotWrite, ...]],
    ) -> None:
        self._config = config
        self._policy = policy
        self._lifecycle = lifecycle
        self._running = lifecycle.running
        self._memory = lifecycle.memory
        self._sampling = sampling
        self._adder = PrefillAdder(lifecycle)
        self._pin = pin
        self._slot_writes = slot_writes
        self._next_step = 1

    def plan(self, now: float, *, after_idle: bool) -> ScheduleBatch | None:
        """The next step, frozen; None when nobody can take one. An empty plan is legal and changes nothing."""
        if self._config.mixed_chunk:
            decode_rows = self._secure_decode()
            segments = self._adder.fill(self._config.chunked_prefill_size, now)
        else:
            segments = self._adder.fill(self._config.chunked_prefill_size, now)
            decode_rows = NO_ROWS if segments else self._secure_decode()
        if not segments and len(decode_rows) == 0:
            return None
        return self._freeze(segments, decode_rows, after_idle)

    def _secure_decode(self) -> Ints:
        """Rows that decode in this step, each with a page for its token; retracts until the rest fits."""
        rows = self._running.decoding()
        while len(rows):
            short = rows[self._memory.needs_page(rows, self._running.planned[rows])]
            if self._memory.grow(short):
                break
            self._give_way()
            rows = self._running.decoding()
        return rows

    def _give_way(self) -> None:
        members = self._running.members()
        loser = victim(members, self._policy)
        if len(members) > 1:
            self._adder.retracted()
            self._lifecycle.retract(loser)
            return
        # Entry checks make this unreachable while pages are conserved; ending one request beats ending the process.
        error = Overloaded("the KV pool cannot hold this request to its end", reason="POOL_EXHAUSTED")
        self._lifecycle.end(Ended(loser, error=error))

    def _freeze(self, segments: list[Segment], decode_rows: Ints, after_idle: bool) -> ScheduleBatch:
        running = self._running
        fresh, fresh_rows = self._lifecycle.take_fresh()
        penalised = [req for req in fresh if req.params.penalised]
        plan = StepPlan(
            step_id=self._next_step,
            segments=segments,
            decode_rows=decode_rows,
            decode_lens=running.planned[decode_rows],
            table_writes=self._memory.take_writes(),
            fresh_rows=fresh_rows,
            history_writes=HistoryWrites(
                tuple(req.row for req in penalised),
                tuple(running.ids(req.row, int(running.known[req.row])) for req in penalised),
            ),
            after_idle=after_idle,
        )
        running.planned[decode_rows] += 1
        self._next_step += 1
        memory = self._memory
        return build_batch(
            plan, memory.rows.generations, memory.slots, self._sampling.batch, self._pin, self._companion_writes
        )

    def _companion_writes(self, rows: Ints, prefix_lens: Ints, extend_lens: Ints) -> Writes:
        """What the pools beside the KV pool need, changes of adapter slots, and the step's token places by slot."""
        writes = self._memory.plan_companions(rows, prefix_lens, extend_lens)
        groups = group_tokens(self._running.adapter_slots[rows], extend_lens)
        slots = self._slot_writes()
        if not (groups or slots):
            return writes
        return {**writes, LORA: LoraWrites(slots, groups, int(extend_lens.sum()))}
