"""Mutants of encoder inputs: who holds which cross pages, which step encodes what, and what a token sees of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from core.batch.build import Segment
from core.batch.schedule_batch import ScheduleBatch
from core.memory.companion import AdmissionFacts
from core.memory.cross.cross_pages import CrossPages, CrossWrites
from core.memory.cross.cross_pool import CrossPool
from core.scheduler.lifecycle import Lifecycle
from core.scheduler.planner import Planner
from core.scheduler.prefill_adder import PrefillAdder
from core.scheduler.sampling_table import FORCE, SamplingTable
from core.types.arrays import Ints
from core.types.request import Req
from tests.proofs.sim.mutants import Break, Patch, mutant, put


def _writes_are(change: Callable[[CrossPages, CrossWrites], CrossWrites]) -> Break:
    """What `change` makes of what each step is told."""

    def apply(patch: Patch) -> None:
        put(patch, CrossPages, "planned", lambda old, self, *args: change(self, old(self, *args)))

    return apply


def _chunks_are(change: Callable[[PrefillAdder, Segment], Segment]) -> Break:
    """What `change` makes of each prompt chunk, once everything else was decided."""

    def apply(patch: Patch) -> None:
        put(patch, PrefillAdder, "_chunk", lambda old, self, *args: change(self, old(self, *args)))

    return apply


def _batches_are(change: Callable[[ScheduleBatch], None]) -> Break:
    """What `change` does to each batch that encodes something, before it is submitted."""

    def frozen(old: Any, self: Planner, *args: Any) -> ScheduleBatch:
        batch: ScheduleBatch = old(self, *args)
        if len(batch.encoder_lens):
            change(batch)
        return batch

    return lambda patch: put(patch, Planner, "_freeze", frozen)


# Who holds which pages.


@mutant("cross_owner")
def cross_pages_of_who_gives_way_are_lost(patch: Patch) -> None:
    """They stay with nobody, as if the input would not have to be encoded again."""

    def retract(old: Any, self: Lifecycle, req: Req, **kwargs: Any) -> None:
        for side in self.memory.companions:
            if isinstance(side, CrossPages):
                side._pages[req.row] = side._pages[req.row][:0]
        old(self, req, **kwargs)

    put(patch, Lifecycle, "retract", retract)


@mutant("cross_owner", "invariant:page_double_free")
def cross_pages_go_back_twice(patch: Patch) -> None:
    """They have two owners soon."""

    def released(old: Any, self: CrossPages, row: int) -> None:
        pages, allocator = self._pages[row], self.allocator
        old(self, row)
        allocator._stack = np.concatenate([allocator._stack[: allocator._top], pages])
        allocator._top = len(allocator._stack)

    put(patch, CrossPages, "released", released)


@mutant("cross_owner")
def cross_pages_last_as_long_as_the_prompt(patch: Patch) -> None:
    """Every decode reads them."""

    def planned(old: Any, self: CrossPages, rows: Ints, *args: Any) -> CrossWrites:
        told: CrossWrites = old(self, rows, *args)
        for row in rows.tolist():
            self.allocator.free(self._pages[row])
            self._pages[row] = self._pages[row][:0]
        return told

    put(patch, CrossPages, "planned", planned)


@mutant("cross_owner", "crash:ValueError")
def inputs_get_a_page_less(patch: Patch) -> None:
    """Those of the last few tokens are never there."""

    def admitted(old: Any, self: CrossPages, row: int, *args: Any, **kwargs: Any) -> None:
        old(self, row, *args, **kwargs)
        if len(self._pages[row]) > 1:
            self.allocator.free(self._pages[row][-1:])
            self._pages[row] = self._pages[row][:-1]

    put(patch, CrossPages, "admitted", admitted)


@mutant("invariant:cross_page_conservation", seeds=(177,))
def cross_pages_are_not_charged(patch: Patch) -> None:
    """Whoever comes is admitted."""
    patch.setattr(CrossPages, "can_admit", lambda self, facts: True)


@mutant("wedged")
def the_last_cross_page_is_never_used(patch: Patch) -> None:
    """Who needs them all waits for ever, though nobody else runs."""

    def can_admit(old: Any, self: CrossPages, facts: AdmissionFacts) -> bool:
        return self.allocator.pages_for(facts.encoder_tokens) < self.allocator.available

    put(patch, CrossPages, "can_admit", can_admit)


@mutant("entry")
def the_door_counts_no_cross_pages(patch: Patch) -> None:
    """What the empty pool cannot hold is let in."""
    patch.setattr(CrossPages, "fits_alone", lambda self, tokens, encoder_tokens: True)


@mutant("entry")
def the_door_wants_a_slot_more(patch: Patch) -> None:
    """Who exactly fills the pool is refused."""

    def fits(old: Any, self: CrossPages, tokens: int, encoder_tokens: int) -> bool:
        return bool(old(self, tokens, encoder_tokens + 1))

    put(patch, CrossPages, "fits_alone", fits)


# What a step encodes.


@mutant("cross_writes", "invariant:cross_row_encoded")
def who_comes_back_is_not_encoded(patch: Patch) -> None:
    """The pages that it gets are not those of its first time."""

    def change(self: PrefillAdder, chunk: Segment) -> Segment:
        req = self._running.reqs[chunk.row]
        return replace(chunk, encoder_ids=None) if req is not None and req.retractions else chunk

    _chunks_are(change)(patch)


@mutant("cross_writes", "chunk_budget")
def every_chunk_brings_the_input(patch: Patch) -> None:
    """Encoded once would have been enough."""

    def change(self: PrefillAdder, chunk: Segment) -> Segment:
        req = self._running.reqs[chunk.row]
        return chunk if req is None else replace(chunk, encoder_ids=req.encoder_ids)

    _chunks_are(change)(patch)


@mutant("chunk_budget", seeds=(21,))
def what_the_encoder_reads_is_free(patch: Patch) -> None:
    """Only tokens of the decoder count, so several long inputs share a step."""
    patch.setattr(Segment, "cost", Segment.length)


@mutant("chunk_budget")
def a_long_input_has_company(patch: Patch) -> None:
    """It joins a step that has work already."""
    patch.setattr(PrefillAdder, "fill", _fill_without_looking)


def _fill_without_looking(self: PrefillAdder, budget: int, now: float, only: object = None) -> list[Segment]:
    """Of production, without the look at the length."""
    segments = [self._chunk(row, budget, None) for row in self._running.prefilling().tolist()[:1]]
    budget -= sum(chunk.cost for chunk in segments)
    while budget > 0:
        tenant = next((each for each in self._shares if each.waits), None)
        req = None if tenant is None else self._best(tenant)
        if req is None or not self._lifecycle.admit(req, self._reserve_pages(req), now):
            break
        self._offered[req.row] = 0
        segments.append(self._chunk(req.row, max(1, budget - req.encoder_len), req))
        budget -= segments[-1].cost
    return segments


@mutant("tokens")
def inputs_are_staged_backwards(patch: Patch) -> None:
    """As many ids of the same requests."""

    def change(batch: ScheduleBatch) -> None:
        ids = batch.staging.encoder_ids_cpu
        batch.staging.encoder_ids_cpu = None if ids is None else ids.flip(0) if hasattr(ids, "flip") else ids[::-1]

    _batches_are(change)(patch)


@mutant("encoder_ids")
def encoder_ids_go_to_the_decoder(patch: Patch) -> None:
    """SGLang has them in front of the decoder's, and strips them again."""

    def change(self: PrefillAdder, chunk: Segment) -> Segment:
        ids = chunk.encoder_ids
        return chunk if ids is None else replace(chunk, ids=np.concatenate([ids, chunk.ids])[: chunk.length])

    _chunks_are(change)(patch)


@mutant("tokens", "ending")
def nothing_is_forced(patch: Patch) -> None:
    """A checkpoint's first and last tokens are free."""

    def fill(old: Any, self: SamplingTable, req: Req) -> None:
        old(self, req)
        biases = self._biases[req.row]
        self._biases[req.row] = biases.of(biases.values < FORCE)

    put(patch, SamplingTable, "fill", fill)


# What a token sees.


@mutant("cross_read")
def the_end_of_an_input_is_not_seen(patch: Patch) -> None:
    """A token short."""
    _writes_are(lambda self, told: replace(told, last_places=np.maximum(told.last_places - 1, 0)))(patch)


@mutant("cross_read")
def everybody_hears_the_first_row(patch: Patch) -> None:
    """All tokens of a step look where its first row has its input."""
    _writes_are(lambda self, told: replace(told, batch_places=told.batch_places * 0))(patch)


@mutant("cross_read")
def inputs_of_a_step_share_a_slot(patch: Patch) -> None:
    """The last to be encoded is the one that all of them hear."""
    _writes_are(lambda self, told: replace(told, slots=np.repeat(told.slots[:1], len(told.slots))))(patch)


@mutant("cross_kept", "cross_read")
def inputs_go_to_the_next_page(patch: Patch) -> None:
    """The table says so too, so that only the owner of that page minds."""

    def change(self: CrossPages, told: CrossWrites) -> CrossWrites:
        size, most = self.allocator.page_size, self.allocator.num_pages * self.allocator.page_size
        return replace(told, slots=told.slots % most + size)

    _writes_are(change)(patch)


@mutant("frozen_batch", "cross_writes")
def submitted_inputs_grow(patch: Patch) -> None:
    """Law 3: the lengths of what was submitted change with the next step."""
    last: list[ScheduleBatch] = []

    def change(batch: ScheduleBatch) -> None:
        if last:
            last[0].encoder_lens[:] += 1
        last[:] = [batch]

    _batches_are(change)(patch)


# The production device side.


@mutant("cross_read", real=True)
def cross_table_entries_come_a_step_late(patch: Patch) -> None:
    """The step that encodes reads what was there before."""

    def begin(old: Any, self: CrossPool, rows: Any, writes: CrossWrites, staging: Any) -> None:
        table = self.table.clone()
        old(self, rows, writes, staging)
        if len(writes.rows):
            self.table.copy_(table)

    put(patch, CrossPool, "begin", begin)


@mutant("cross_read", real=True)
def tokens_end_in_the_slot_before(patch: Patch) -> None:
    """What the attention is told is not what the plan says."""

    def begin(old: Any, self: CrossPool, rows: Any, writes: CrossWrites, staging: Any) -> None:
        old(self, rows, writes, staging)
        self.last_slots = self.last_slots - 1

    put(patch, CrossPool, "begin", begin)


@mutant("encoder_ids", "cross_writes", "invariant:encoder_length", "crash:RuntimeError", real=True)
def the_encoder_gets_what_the_decoder_does(patch: Patch) -> None:
    """One staging for both."""

    def change(batch: ScheduleBatch) -> None:
        staging, count = batch.staging, int(batch.encoder_lens.sum())
        assert staging.prefill_ids_cpu is not None, "a step that encodes has a first chunk"
        staging.encoder_ids_cpu = staging.prefill_ids_cpu[:1].expand(count)

    _batches_are(change)(patch)
