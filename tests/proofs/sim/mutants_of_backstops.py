"""Mutants that only a backstop sees: an oracle that stands behind others, which speak first when all else is wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from core.batch.build import Segment
from core.engine.async_engine import AsyncEngine
from core.memory.recurrent.state_slots import StateSlots
from core.memory.rows import RowAllocator
from core.scheduler.prefill_adder import PrefillAdder, Prompts
from core.scheduler.sampling_table import FORCE, SamplingTable
from core.types.arrays import Ints
from core.types.request import Req
from core.types.stats import PoolStats
from tests.proofs.sim.mutants import Patch, mutant, put
from tests.proofs.sim.scenes import the_device_is_ahead


@mutant("unread_token")
def generation_grows_when_the_row_is_taken(patch: Patch) -> None:
    """And not when it is freed: the last owner of a row stays its owner, with a token that no request asked for."""

    def free(old: Any, self: RowAllocator, row: int, generation: int) -> None:
        old(self, row, generation)
        self.generations[row] -= 1

    def alloc(old: Any, self: RowAllocator) -> tuple[int, int] | None:
        taken = old(self)
        if taken is not None:
            self.generations[taken[0]] += 1
        return None if taken is None else (taken[0], taken[1] + 1)

    def current(old: Any, self: RowAllocator, rows: Ints, generations: Ints) -> np.ndarray:
        found: np.ndarray = old(self, rows, generations) & self._held[rows]
        return found

    put(patch, RowAllocator, "free", free)
    put(patch, RowAllocator, "alloc", alloc)
    put(patch, RowAllocator, "is_current", current)


@mutant("relay_check", scene=the_device_is_ahead)
def forced_tokens_are_below_zero(patch: Patch) -> None:
    """What the device takes for "unwritten": the next step reads it before any client could see it."""

    def fill(old: Any, self: SamplingTable, req: Req) -> None:
        old(self, req)
        biases = self._biases[req.row]
        self._biases[req.row] = replace(biases, tokens=np.where(biases.values == FORCE, -1, biases.tokens))

    put(patch, SamplingTable, "fill", fill)


@mutant("queue_bound")
def the_door_counts_nobody(patch: Patch) -> None:
    """A full queue takes more."""
    patch.setattr(AsyncEngine, "_refuse_if_late_or_full", lambda self, request, now: None)


@mutant("leak")
def kept_states_count_as_used(patch: Patch) -> None:
    """Every slot and page is where it belongs, and the statistics say that it is held."""

    def stats(old: Any, self: StateSlots) -> tuple[PoolStats, ...]:
        return (PoolStats(self.name, self.size, self.size - len(self._free)),)

    put(patch, StateSlots, "stats", stats)


@mutant("liveness")
def prompts_come_in_single_tokens(patch: Patch) -> None:
    """Everybody gets on, in many more steps than the budget allows for."""

    def chunk(old: Any, self: PrefillAdder, row: int, budget: int, *encoder: Any) -> Segment:
        segment: Segment = old(self, row, 1, *encoder)
        return segment

    def go_on(old: Any, self: PrefillAdder, turn: Prompts, *args: Any) -> Segment | None:
        segment: Segment | None = old(self, turn, *args)
        # Else the rest of the budget would bring the same row again in the same step.
        if segment is not None and not segment.final:
            turn.started.popleft()
        return segment

    put(patch, PrefillAdder, "_chunk", chunk)
    put(patch, PrefillAdder, "_go_on", go_on)
