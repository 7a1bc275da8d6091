"""Mutants of rows, pages, the prefix cache, and of what is submitted to the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from core.batch.build import Segment, joined
from core.batch.schedule_batch import ScheduleBatch
from core.memory import request_memory
from core.memory.kv_allocator import PagedKVAllocator
from core.memory.req_to_token_pool import ReqToTokenPool, TableWrites
from core.memory.request_memory import RequestMemory
from core.memory.rows import RowAllocator
from core.prefix.radix import RadixCache
from core.relay.future_map import FutureMap
from core.scheduler.lifecycle import Lifecycle
from core.scheduler.outputs import Ending
from core.scheduler.planner import Planner
from core.scheduler.prefill_adder import PrefillAdder
from core.scheduler.running import RunningSet
from core.scheduler.scheduler import Scheduler
from core.types.arrays import Ints
from core.types.io import FinishReason
from core.types.request import Req, RequestState
from tests.proofs.sim.mutants import MUTANTS, Break, Mutant, Patch, mutant, put
from tests.proofs.sim.scenes import a_prefix_is_shared


@mutant("tokens", "positions", "kv_length", "unasked_end")
def results_of_former_owners_are_taken(patch: Patch) -> None:
    """Law 1: no generation check, as long as the row has any owner."""
    patch.setattr(RowAllocator, "is_current", lambda self, rows, generations: self._held[rows])


@mutant("one_owner", "batch_rows", "invariant:row_padding_reserved")
def row_zero_is_handed_out(patch: Patch) -> None:
    """Law 6."""

    def begin(old: Any, self: RowAllocator, size: int) -> None:
        old(self, size)
        self._free = list(range(size - 1, -1, -1))

    def alloc(old: Any, self: RowAllocator) -> tuple[int, int] | None:
        if not self._free:
            return None
        row = self._free.pop()
        self._held[row] = True
        return row, int(self.generations[row])

    put(patch, RowAllocator, "__init__", begin)
    put(patch, RowAllocator, "alloc", alloc)


@mutant("positions", "invariant:request_state")
def generation_is_not_bumped(patch: Patch) -> None:
    """Law 1: the result of a former owner looks current."""

    def free(old: Any, self: RowAllocator, row: int, generation: int) -> None:
        self._held[row] = False
        self._free.append(row)

    put(patch, RowAllocator, "free", free)


# Pages.


@mutant("kv_length")
def page_is_taken_one_token_late(patch: Patch) -> None:
    """`>` for `>=`."""
    patch.setattr(RequestMemory, "needs_page", lambda self, rows, at: at > self._count[rows] * self.page_size)


@mutant("fits_alone")
def page_is_taken_one_token_early(patch: Patch) -> None:
    """Who exactly fits no longer does."""
    patch.setattr(RequestMemory, "needs_page", lambda self, rows, at: at + 1 >= self._count[rows] * self.page_size)


@mutant("page_owner")
def pages_are_freed_twice(patch: Patch) -> None:
    """Production's check does not see it, because the second free goes round it."""

    def twice(old: Any, self: PagedKVAllocator, pages: Ints) -> None:
        old(self, pages)
        if len(pages) and self._top + len(pages) <= self.num_pages:
            self._stack[self._top : self._top + len(pages)] = pages
            self._top += len(pages)

    put(patch, PagedKVAllocator, "free", twice)


def _release_skipped(when: Callable[[Ending], bool]) -> Break:
    def apply(patch: Patch) -> None:
        def leaky(old: Any, self: Lifecycle, ended: Ending, **kwargs: Any) -> None:
            skipped = when(ended) and ended.req.state is RequestState.RUNNING
            if skipped:
                self.memory.release = lambda *_: None  # type: ignore[method-assign]
            old(self, ended, **kwargs)
            if skipped:
                del self.memory.release

        put(patch, Lifecycle, "end", leaky)

    return apply


for _name, _when in (
    ("cancel", lambda ended: ended.reason is FinishReason.CANCELLED),
    ("length", lambda ended: ended.reason is FinishReason.LENGTH),
    ("stop", lambda ended: ended.reason is FinishReason.STOP),
    ("deadline", lambda ended: type(ended.error).__name__ == "DeadlinePassed"),
    ("slow_reader", lambda ended: type(ended.error).__name__ == "SlowConsumer"),
    ("non_finite", lambda ended: type(ended.error).__name__ == "RequestFailed"),
):
    _seen = ("one_place", "invariant:prefix_lock_balance")
    MUTANTS.append(Mutant(f"release_is_skipped_on_{_name}", _seen, _release_skipped(_when)))


@mutant("kv_read")
def offered_before_planned(patch: Patch) -> None:
    """The cache hears of pages that no submitted step writes yet."""

    def eager(old: Any, self: PrefillAdder, row: int, *args: Any) -> Segment:
        self._memory.offer(row, self._running.ids(row, int(self._running.prefill_end[row])))
        segment: Segment = old(self, row, *args)
        return segment

    put(patch, PrefillAdder, "_chunk", eager)


@mutant("kv_read", "page_owner", "invariant:page_padding_reserved", "invariant:page_conservation")
def released_beyond_what_was_written(patch: Patch) -> None:
    """At its end a request gives the cache pages for tokens that no step has computed."""

    def boastful(old: Any, self: RunningSet, req: Req) -> Ints:
        ids = self.ids(req.row, int(self.known[req.row]))
        old(self, req)
        return ids

    put(patch, RunningSet, "remove", boastful)


@mutant("lock_holders", scene=a_prefix_is_shared)
def locked_prefix_is_not_unlocked(patch: Patch) -> None:
    """A prefix that somebody read once stays for ever."""

    def keep(old: Any, self: RequestMemory, row: int, generation: int, ids: Ints) -> None:
        unlock, self.cache.unlock = self.cache.unlock, lambda node: np.empty(0, np.int64)  # type: ignore[method-assign]
        old(self, row, generation, ids)
        self.cache.unlock = unlock  # type: ignore[method-assign]

    put(patch, RequestMemory, "release", keep)


@mutant("batch_rows")
def match_takes_the_whole_prompt(patch: Patch) -> None:
    """No token is left to compute, so there are no logits to sample from."""

    def one_more(old: Any, cache: Any, companions: Any, ids: Ints, limit: int, *more: Any) -> Any:
        return old(cache, companions, ids, limit + 1, *more)

    put(patch, request_memory, "usable_prefix", one_more)


@mutant("tenant")
def salts_are_ignored(patch: Patch) -> None:
    """Tenants share prefixes: every token is right, and one can tell from the time what others ask."""
    # Those of adapters, in front of the NUL, stay apart: otherwise tokens would be wrong.
    put(patch, RadixCache, "_reach", lambda old, self, data, salt: old(self, data, salt[: salt.find("\0") + 1]))


@mutant("entry")
def entry_counts_pages_differently(patch: Patch) -> None:
    """D24: the check at entry and the one at admission use two formulas."""
    put(patch, RequestMemory, "fits_alone", lambda old, self, tokens, *encoder: old(self, tokens + 1, *encoder))


# The device's side.


@mutant("page_table")
def table_writes_are_lost(patch: Patch) -> None:
    """The device keeps an entry of the former owner."""

    def lossy(old: Any, self: RequestMemory) -> TableWrites:
        writes = old(self)
        return TableWrites(writes.rows[:-1], writes.places[:-1], writes.pages[:-1], writes.page_size)

    put(patch, RequestMemory, "take_writes", lossy)


@mutant("out_cache_loc", real=True)
def two_tokens_share_a_slot(patch: Patch) -> None:
    """The last token of a step is written over the first."""

    def same(old: Any, self: ReqToTokenPool, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        slots: torch.Tensor = old(self, rows, positions)
        slots[-1:] = slots[:1]
        return slots

    put(patch, ReqToTokenPool, "slots", same)


@mutant("page_table")
def two_entries_name_one_page(patch: Patch) -> None:
    """The last table entry of a step names the page of the first."""

    def same(old: Any, self: RequestMemory) -> TableWrites:
        writes = old(self)
        pages = writes.pages.copy()
        pages[-1:] = pages[:1]
        return replace(writes, pages=pages)

    put(patch, RequestMemory, "take_writes", same)


@mutant("crash:RuntimeError", "ledger:read-before-write", "tokens", real=True)
def stash_comes_a_step_late(patch: Patch) -> None:
    """Rows are not forgotten, and tokens arrive after the next step has read: gather before publish."""
    held: dict[int, tuple[Any, Any]] = {}

    def late(old: Any, self: FutureMap, rows: Any, payload: Any) -> None:
        if id(self) in held:
            old(self, *held.pop(id(self)))
        held[id(self)] = (rows, payload)

    put(patch, FutureMap, "stash", late)
    patch.setattr(FutureMap, "forget", lambda self, rows: None)


@mutant("crash:RuntimeError", real=True)
def rows_are_forgotten_after_the_stash(patch: Patch) -> None:
    """The order of two effects inside a step."""
    forgotten: dict[int, Any] = {}

    def stash(old: Any, self: FutureMap, rows: Any, payload: Any) -> None:
        old(self, rows, payload)
        forget(self, forgotten.pop(id(self)))

    forget = FutureMap.forget
    patch.setattr(FutureMap, "forget", lambda self, rows: forgotten.update({id(self): rows}))
    put(patch, FutureMap, "stash", stash)


@mutant("frozen_batch")
def submitted_batch_changes(patch: Patch) -> None:
    """Law 3: somebody writes into what the device may be reading, where no token shows it."""
    batches: list[ScheduleBatch] = []

    def thaw(old: Any, self: Planner, *args: Any) -> ScheduleBatch:
        for batch in batches:
            batch.sampling.uniforms[:] += float(batch.sampling.all_greedy)
        batches[:] = [old(self, *args)]
        return batches[0]

    put(patch, Planner, "_freeze", thaw)


@mutant("executor_depth")
def three_steps_are_submitted(patch: Patch) -> None:
    """Law 10."""

    def submit(old: Any, self: Scheduler, now: float) -> bool:
        moved: bool = old(self, now)
        away = self.executor.in_flight
        if moved and (batch := self._planner.plan(now, after_idle=False, slow=False, in_flight=away)) is not None:
            self.executor.submit(batch)
        return moved

    put(patch, Scheduler, "_submit", submit)


@mutant("chunk_budget")
def chunk_budget_is_exceeded(patch: Patch) -> None:
    """One token more than a step may hold."""
    put(patch, PrefillAdder, "fill", lambda old, self, budget, *args: joined(old(self, budget + 1, *args)))


@mutant("tokens", "ledger:write-write", "invariant:output_position")
def middle_chunks_sample(patch: Patch) -> None:
    """Every chunk of a prompt writes a token, which nobody reads."""
    put(patch, PrefillAdder, "_chunk", lambda old, self, *args: replace(old(self, *args), final=True))
