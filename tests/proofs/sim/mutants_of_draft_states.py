"""Mutants of recurrent states behind drafts: which of them is the row's, and which is kept for a page.

Not on the list: the state behind a wrong draft goes into the slot of a page that its row does not reach yet. Nothing
looks for it before the row is there, and that step writes the right one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from core.device.staging import Staging
from core.memory.recurrent.row_to_slot import HybridReqToTokenPool
from core.memory.recurrent.state_slots import StateSlots, Tracked
from core.memory.request_memory import RequestMemory
from core.models.hf.recurrent import StateContext
from core.types.arrays import Ints
from tests.proofs.sim.mutants import Patch, mutant, put

# The production device side.


@mutant("state_read", drafts=True, real=True)
def the_last_place_is_the_row_s_state(patch: Patch) -> None:
    """Whatever became of the drafts."""

    def judged(old: Any, self: HybridReqToTokenPool, counts: Ints, staging: Staging) -> None:
        assert self._places is not None, "the step verified drafts"
        old(self, self._places.counts, staging)

    put(patch, HybridReqToTokenPool, "judged", judged)


@mutant("state_read", drafts=True, real=True)
def a_row_goes_on_a_token_early(patch: Patch) -> None:
    """From the state before its newest right draft."""

    def judged(old: Any, self: HybridReqToTokenPool, counts: Ints, staging: Staging) -> None:
        old(self, np.maximum(counts - 1, 1), staging)

    put(patch, HybridReqToTokenPool, "judged", judged)


@mutant("state_read", drafts=True, real=True)
def no_state_is_picked(patch: Patch) -> None:
    """A row stays where its newest token brought it."""

    def judged(self: HybridReqToTokenPool, counts: Ints, staging: Staging) -> None:
        self._places = None

    patch.setattr(HybridReqToTokenPool, "judged", judged)


@mutant("state_read", drafts=True, real=True)
def drafts_are_a_chunk(patch: Patch) -> None:
    """They go through a mixer at once, and the row's own state is what is behind the last."""

    def begin(old: Any, self: StateContext, batch: Any) -> None:
        batch.verifies, verifies = False, batch.verifies
        old(self, batch)
        assert self.pool is not None
        if verifies:
            self.pool.verify(batch.extend_lens_host, Staging(batch.rows.device))

    put(patch, StateContext, "begin", begin)


@mutant("state_snapshot", drafts=True, real=True)
def plain_steps_keep_what_is_planned(patch: Patch) -> None:
    """A page gets the state of a row that is not there yet, or was there long ago."""

    def measured(old: Any, self: HybridReqToTokenPool, prefix_lens: Ints, extend_lens: Ints, staging: Staging) -> None:
        old(self, prefix_lens, extend_lens, staging) if (extend_lens > 1).any() else None
        self._prefix_lens = prefix_lens

    put(patch, HybridReqToTokenPool, "measured", measured)


# The host side.


@mutant("state_snapshot", drafts=True)
def a_state_is_due_in_one_step(patch: Patch) -> None:
    """Whether its row comes so far in it or not."""
    patch.setattr(StateSlots, "_still_due", lambda self, *args: [])


@mutant("state_snapshot", drafts=True)
def a_lost_slot_is_replaced(patch: Patch) -> None:
    """Though the row may be further already."""

    def track(old: Any, self: StateSlots, rows: Ints, prefix_lens: Ints, *args: Any) -> Tracked:
        self._most[rows] = prefix_lens
        tracked: Tracked = old(self, rows, prefix_lens, *args)
        return tracked

    put(patch, StateSlots, "_track", track)


@mutant("draft_plan", drafts=True)
def drafts_have_room_for_one_row(patch: Patch) -> None:
    """The room for states behind drafts counts for each row."""

    def build(old: Any, self: RequestMemory, *args: Any, **kwargs: Any) -> None:
        old(self, *args, **kwargs)
        self.draft_room = None if self.draft_room is None else self.draft_room * self.rows.size

    put(patch, RequestMemory, "__init__", build)
