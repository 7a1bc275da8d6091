"""Mutants of what is planned and when: work left undone, pages given up for nothing, turns taken out of order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from core.memory.recurrent.state_slots import StateSlots
from core.memory.request_memory import RequestMemory
from core.memory.window.window_pages import WindowPages
from core.scheduler import policy
from core.scheduler.planner import Planner
from core.scheduler.policy import LongestPrefixMatch
from core.scheduler.prefill_adder import PrefillAdder
from core.scheduler.scheduler import Scheduler
from core.types.arrays import Ints
from core.types.request import Req
from tests.proofs.sim.mutants import Patch, mutant, put
from tests.proofs.sim.scenes import two_tenants_wait, younger_ones_pass


@mutant("overlap")
def steps_never_overlap(patch: Patch) -> None:
    """Law 10: a step is planned when the one before it is over, and the device waits for the host."""

    def one_by_one(old: Any, self: Scheduler, now: float) -> bool:
        if self.executor.in_flight:
            return False
        batch = self._planner.plan(now, after_idle=self._device_idle, slow=False, in_flight=0)
        self._device_idle = batch is None
        if batch is not None:
            self.executor.submit(batch)
            self.tally.submitted(batch)
        return batch is not None

    put(patch, Scheduler, "_submit", one_by_one)


@mutant("left_out", seeds=(45,))
def one_row_decodes_in_a_step(patch: Patch) -> None:
    """Each gets all its tokens, at the pace of one row."""
    put(patch, Planner, "_secure_decode", lambda old, self, *only: (d := old(self, *only)).without(d.rows[1:]))


@mutant("kept_waiting", seeds=(17,))
def pages_are_reserved_twice_over(patch: Patch) -> None:
    """More than all rows may still put out, so a pool that is half empty admits none."""
    put(
        patch,
        PrefillAdder,
        "_reserve_pages",
        lambda old, self, req: 2 * old(self, req) and self._memory.obtainable_pages,
    )


@mutant("evicted")
def more_is_evicted_than_is_short(patch: Patch) -> None:
    """Prefixes go that had room to stay."""

    def alloc(self: RequestMemory, count: int) -> Ints | None:
        if count > self.allocator.available:
            self._free(self.cache.evict(count))
        return self.allocator.alloc(count)

    patch.setattr(RequestMemory, "_alloc", alloc)


@mutant("evicted")
def pages_are_evicted_ahead(patch: Patch) -> None:
    """A request that leaves takes a prefix along, before another needs its page."""

    def release(old: Any, self: RequestMemory, *args: Any) -> None:
        old(self, *args)
        self._free(self.cache.evict(1))

    put(patch, RequestMemory, "release", release)


@mutant("evicted")
def states_go_before_free_slots(patch: Patch) -> None:
    """The oldest snapshot is overwritten, and a free slot stays free."""

    def take(self: StateSlots) -> int:
        return self._snapshots.drop_oldest() if len(self._snapshots) else self._free.pop()

    patch.setattr(StateSlots, "_take", take)


@mutant("evicted")
def window_pages_go_before_free_ones(patch: Patch) -> None:
    """A window that a request could have resumed in is overwritten, and a free page stays free."""

    def begin(old: Any, self: WindowPages, row: int, pages: list[int]) -> None:
        spared = len(self._idle) >= len(pages)
        kept, self._free = (self._free, []) if spared else ([], self._free)
        old(self, row, pages)
        self._free = kept + self._free

    put(patch, WindowPages, "_begin", begin)


# The order under `lpm`.


def _chosen_by(rank: Callable[[Req, int], tuple[Any, ...]]) -> Callable[[Patch], None]:
    def apply(patch: Patch) -> None:
        def choose(self: LongestPrefixMatch, head: Iterable[Req], match_len: Callable[[Req], int]) -> Req:
            return min(head, key=lambda req: rank(req, match_len(req)))

        patch.setattr(LongestPrefixMatch, "choose", choose)

    return apply


@mutant("lpm_order", scene=younger_ones_pass)
def longest_match_is_not_looked_for(patch: Patch) -> None:
    """First come, first served, under another name."""
    _chosen_by(lambda req, cached: (req.sequence,))(patch)


@mutant("lpm_order", scene=younger_ones_pass)
def ties_go_to_the_newest(patch: Patch) -> None:
    """Of those who match as long."""
    _chosen_by(lambda req, cached: (req.passed_over < policy.LPM_PATIENCE, -cached, -req.sequence))(patch)


@mutant("lpm_order", scene=two_tenants_wait)
def order_counts_what_others_cached(patch: Patch) -> None:
    """A prefix of another tenant, which an admission will not find."""

    def peek(old: Any, self: PrefillAdder, req: Req) -> int:
        ids = req.known_ids()
        roots = getattr(self._memory.cache, "_roots", ())
        return max((self._memory.cache.peek(ids, len(ids) - 1, salt) for salt in roots), default=0)

    put(patch, PrefillAdder, "_match_len", peek)


@mutant("lpm_order", scene=younger_ones_pass)
def nobody_runs_out_of_patience(patch: Patch) -> None:
    """Cache hits starve the others."""
    patch.setattr(policy, "LPM_PATIENCE", 10**9)
