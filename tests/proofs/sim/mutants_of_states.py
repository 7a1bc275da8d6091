"""Mutants of recurrent states: who has a slot, what is kept for pages, and the production device side."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from core.memory.companion import AdmissionFacts
from core.memory.recurrent import state_slots
from core.memory.recurrent.row_to_slot import HybridReqToTokenPool
from core.memory.recurrent.state_slots import StateSlots, StateWrites
from core.memory.recurrent.state_snapshots import StateSnapshots, Tracking
from core.memory.request_memory import RequestMemory
from core.models.hf.recurrent import PackedMixer
from core.scheduler.lifecycle import Lifecycle
from core.types.arrays import Ints
from core.types.request import Req
from tests.proofs.sim.mutants import Break, Patch, mutant, put


def _writes_are(change: Any) -> Break:
    """Every `StateWrites` goes through `change`."""

    def apply(patch: Patch) -> None:
        def planned(old: Any, self: StateSlots, *args: Any) -> StateWrites | None:
            writes = old(self, *args)
            return None if writes is None else change(writes)

        put(patch, StateSlots, "planned", planned)

    return apply


@mutant("state_read")
def state_is_not_cleared(patch: Patch) -> None:
    """A new owner goes on from what the former one left."""
    own = _writes_are(lambda writes: replace(writes, sources=np.where(writes.sources, writes.sources, writes.slots)))
    own(patch)


@mutant("state_read")
def state_is_copied_from_another_slot(patch: Patch) -> None:
    """The neighbour of the one that was kept."""
    _writes_are(lambda writes: replace(writes, sources=np.maximum(writes.sources - 1, 0)))(patch)


@mutant("state_writes")
def last_new_owner_is_not_told(patch: Patch) -> None:
    """The device looks where the former owner's state is."""
    shorter = _writes_are(
        lambda writes: replace(writes, rows=writes.rows[:-1], slots=writes.slots[:-1], sources=writes.sources[:-1])
    )
    shorter(patch)


@mutant("state_read", "frozen_batch")
def submitted_states_change(patch: Patch) -> None:
    """Law 3: the arrays of the step before are used again."""
    before: list[StateWrites] = []

    def reuse(writes: StateWrites) -> StateWrites:
        for each in before:
            each.sources[:] = 0
        before[:] = [writes]
        return writes

    _writes_are(reuse)(patch)


# Who has a slot.


@mutant("state_owner")
def slot_is_taken_in_the_queue(patch: Patch) -> None:
    """D18: who is refused, and aborted while it waits, had one already."""

    def admit(old: Any, self: RequestMemory, *args: Any, **kwargs: Any) -> Any:
        taken = {host: host._free.pop() for host in self.companions if isinstance(host, StateSlots) and host._free}
        admission = old(self, *args, **kwargs)
        if admission is not None:
            for host, slot in taken.items():
                host._free.append(slot)
        return admission

    put(patch, RequestMemory, "admit", admit)


@mutant("state_owner", "invariant:state_slot_conservation", "cross_owner")
def slot_is_lost_when_a_prefill_is_aborted(patch: Patch) -> None:
    """Rows and pages go back, and the companion is not told."""

    def unseat(old: Any, self: Lifecycle, req: Req, **kwargs: Any) -> None:
        companions = self.memory.companions
        if self.running.planned[req.row] < self.running.prefill_end[req.row]:
            self.memory.companions = ()
        old(self, req, **kwargs)
        self.memory.companions = companions

    put(patch, Lifecycle, "_unseat", unseat)


@mutant("state_owner")
def two_rows_share_the_last_slot(patch: Patch) -> None:
    """Rows are counted at admission, and slots are not."""

    def admitted(old: Any, self: StateSlots, row: int, facts: AdmissionFacts) -> None:
        if self.available:
            old(self, row, facts)
        else:
            self._slot_of[row] = slot = int(self._slot_of.max())
            self._fresh[row] = (slot, 0)

    patch.setattr(StateSlots, "can_admit", lambda self, facts: True)
    put(patch, StateSlots, "admitted", admitted)


@mutant("state_owner")
def tracked_slots_are_freed_with_their_row(patch: Patch) -> None:
    """What a request kept while it decoded belongs to the cache by now."""

    def released(old: Any, self: StateSlots, row: int) -> None:
        self._free += [slot for page in self._turns[row] if (slot := self._snapshots.find(page))]
        old(self, row)

    put(patch, StateSlots, "released", released)


@mutant("state_owner")
def snapshots_are_freed_twice(patch: Patch) -> None:
    """Once with their page, and once more."""

    def freed(old: Any, self: StateSlots, pages: Ints) -> None:
        found = [slot for page in pages.tolist() if (slot := self._snapshots.find(page))]
        old(self, pages)
        self._free += found

    put(patch, StateSlots, "freed", freed)


@mutant("state_owner", "state_snapshot")
def snapshots_outlive_their_pages(patch: Patch) -> None:
    """Whoever gets the page next is resumed from what its former owner had."""
    patch.setattr(StateSlots, "freed", lambda self, pages: None)


@mutant("state_owner")
def replaced_snapshots_are_lost(patch: Patch) -> None:
    """Those of a duplicate page are forgotten with their slots, where the cached page has one already."""

    def replaced(old: Any, self: StateSlots, pages: Ints, originals: Ints) -> None:
        old(self, pages, originals)
        for page in pages.tolist():
            self._snapshots.drop(page)

    put(patch, StateSlots, "replaced", replaced)


@mutant("state_snapshot", "state_read")
def replaced_snapshots_go_to_a_neighbour(patch: Patch) -> None:
    """Two lists that belong together are cut apart."""
    put(patch, StateSlots, "replaced", lambda old, self, pages, originals: old(self, pages, originals[::-1]))


@mutant("state_read", seeds=(45,))
def source_is_free_before_it_is_read(patch: Patch) -> None:
    """A snapshot is given up once somebody is admitted behind it; the copy is made later."""

    def admitted(old: Any, self: StateSlots, row: int, facts: AdmissionFacts) -> None:
        old(self, row, facts)
        if len(facts.cached) and (slot := self._snapshots.drop(int(facts.cached[-1]))):
            self._free.insert(0, slot)

    put(patch, StateSlots, "admitted", admitted)


# What is kept for pages.


@mutant("state_resume")
def one_track_buffer_under_overlap(patch: Patch) -> None:
    """The only state that was kept gives way to one that may prove to be for nothing."""

    def begin(
        old: Any, self: StateSlots, size: int, num_rows: int, tracking: Tracking | None = None, draft_room: int = 0
    ) -> None:
        old(self, size, num_rows, None if tracking is None else replace(tracking, buffers=1), draft_room)

    put(patch, StateSlots, "__init__", begin)


@mutant("state_snapshot", "state_owner")
def snapshot_is_keyed_one_page_later(patch: Patch) -> None:
    """Off by one: a prefix one page longer is taken to be resumable."""

    def track(old: Any, self: StateSlots, *args: Any) -> Any:
        return old(self, *args[:-1], np.roll(args[-1], -1, axis=1))

    put(patch, StateSlots, "_track", track)


@mutant("state_writes")
def states_are_kept_inside_pages(patch: Patch) -> None:
    """The last token before the end of the prompt instead of the last page boundary."""

    def admitted(old: Any, self: StateSlots, row: int, facts: AdmissionFacts) -> None:
        old(self, row, facts)
        if self._marks[row, 1]:
            self._marks[row, 1] = facts.tokens - 1

    put(patch, StateSlots, "admitted", admitted)


@mutant("state_writes")
def two_states_go_into_one_slot(patch: Patch) -> None:
    """What was kept earlier in the same step is the oldest that there is."""

    def slot_for(old: Any, self: StateSlots, turns: deque[int] | None, taken: list[int]) -> int:
        slot: int = old(self, turns, [])
        return slot

    put(patch, StateSlots, "_slot_for", slot_for)


@mutant("state_read")
def missing_snapshots_are_ignored(patch: Patch) -> None:
    """A cached prefix is taken at its full length, as for a model without recurrent states."""

    def keep(old: Any, self: StateSnapshots, page: int, slot: int) -> None:
        if slot:
            old(self, page, slot)

    patch.setattr(StateSnapshots, "longest", lambda self, pages: len(pages))
    patch.setattr(state_slots, "check", lambda *args, **facts: None)
    put(patch, StateSnapshots, "keep", keep)


@mutant("state_snapshot", "state_read")
def running_state_is_donated(patch: Patch) -> None:
    """At its end a request leaves its own state behind, which is further than the last whole page."""

    def release(old: Any, self: RequestMemory, row: int, generation: int, ids: Ints) -> None:
        count = len(ids) // self.page_size
        page = int(self._pages[row, count - 1]) if count else 0
        host = next((each for each in self.companions if isinstance(each, StateSlots)), None)
        slot = host.slot_of(row) if host else 0
        old(self, row, generation, ids)
        if (
            host
            and page
            and page not in self.allocator._stack[: self.allocator._top]
            and not host._snapshots.find(page)
        ):
            host._free.remove(slot)
            host._snapshots.keep(page, slot)

    put(patch, RequestMemory, "release", release)


# The production device side.


@mutant("state_read", real=True)
def mapping_is_read_before_it_is_written(patch: Patch) -> None:
    """The order of two effects inside a step."""

    def begin(old: Any, self: HybridReqToTokenPool, rows: torch.Tensor, *args: Any) -> None:
        before = self.mapping[rows]
        old(self, rows, *args)
        self.step_slots = before

    put(patch, HybridReqToTokenPool, "begin", begin)


@mutant("state_snapshot", real=True)
def state_is_kept_at_the_end_of_the_chunk(patch: Patch) -> None:
    """The segment is not cut at the page boundary."""

    def segment(old: Any, self: PackedMixer, segment: torch.Tensor, prefix: int, slots: torch.Tensor, cuts: Any) -> Any:
        return old(self, segment, prefix, slots, [(segment.shape[1], tracked) for _, tracked in cuts])

    put(patch, PackedMixer, "_segment", segment)


@mutant("state_snapshot", real=True)
def decode_states_are_kept_a_token_early(patch: Patch) -> None:
    """Copied before the step's token is consumed."""

    def run(old: Any, self: PackedMixer, hidden: torch.Tensor, slots: torch.Tensor, *sources: Any) -> torch.Tensor:
        pool = self._context.pool
        assert pool is not None
        if self._context.trial is not None:
            verified: torch.Tensor = old(self, hidden, slots, *sources)
            return verified
        first = self._context.num_cuts
        early = pool.states.gather(self._layer_id, pool.tracked_from[first:])
        said: torch.Tensor = old(self, hidden, slots)
        if len(slots) == len(pool.step_slots) - self._context.num_extend and first < len(pool.tracked_slots):
            pool.tracked = replace(pool.tracked, places=pool.tracked.places[:first])
            pool.states.scatter(self._layer_id, pool.tracked_slots[first:], *early)
        return said

    put(patch, PackedMixer, "_run", run)


@mutant("wedged")
def a_request_that_could_resume_is_refused(patch: Patch) -> None:
    """It waits for its prefix to go, and nothing else is there to drive that out."""
    put(patch, StateSlots, "can_admit", lambda old, self, facts: old(self, facts) and not len(facts.cached))
