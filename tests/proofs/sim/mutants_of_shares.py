"""Mutants of who gives way to a higher class or another tenant, and of whose turn it is, tenants or kinds of steps."""

from __future__ import annotations

from typing import Any

from core.scheduler import preemption
from core.scheduler.fair_share import FairShare
from core.scheduler.holdings import Holdings
from core.scheduler.lifecycle import Lifecycle
from core.scheduler.planner import Decodes, Planner
from core.scheduler.preemption import Preemption
from core.scheduler.prefill_adder import PrefillAdder
from core.scheduler.turns import Turns
from core.types.arrays import Ints
from core.types.request import Req
from tests.proofs.sim.mutants import Patch, mutant, put
from tests.proofs.sim.scenes import every_row_is_taken, pages_run_out, two_long_prompts


@mutant("class", "in_vain", policy="priority")
def equal_classes_give_way(patch: Patch) -> None:
    """The request that waits need not be of a higher class."""

    def lax(old: Any, self: Preemption, *args: Any) -> None:
        old(self, *args)
        self._threshold = 0

    put(patch, Preemption, "__init__", lax)


@mutant("restless", "robbed", policy="priority")
def who_gave_way_may_do_so_at_once(patch: Patch) -> None:
    """No hysteresis: each newcomer of a higher class costs the same request its whole prompt again."""
    patch.setattr(preemption, "MIN_TOKENS", 0)


@mutant("in_vain", seeds=(4115,))
def requests_give_way_before_the_newcomer_is_tried(patch: Patch) -> None:
    """Though there is room for both."""

    def eager(self: PrefillAdder, req: Req, budget: int, now: float, *, alone: bool) -> bool:
        return (alone or req.encoder_len < budget) and (
            self._make_way(req, now) or self._lifecycle.admit(req, self._reserve_pages(req), now)
        )

    patch.setattr(PrefillAdder, "_admit", eager)


@mutant("inversion", seeds=(2970,))
def nobody_gives_way(patch: Patch) -> None:
    """As if it were switched off. In small pools one request seldom blocks another for long."""
    patch.setattr(Preemption, "_candidates", lambda self, newcomer, rows: [])


@mutant("batch_rows", "kv_length", "invariant:window_page_present", policy="priority")
def rows_that_gave_way_still_decode(patch: Patch) -> None:
    """A row keeps its place in the step in which its owner left it."""
    patch.setattr(PrefillAdder, "vacated", property(lambda self: [], lambda self, value: None), raising=False)


@mutant("stats", policy="priority")
def preemptions_by_class_are_counted_twice(patch: Patch) -> None:
    """The two counters do not add up to what happened."""

    def twice(old: Any, self: Lifecycle, req: Req, newcomer: Req) -> None:
        old(self, req, newcomer)
        self._tally.preemptions += 1

    put(patch, Lifecycle, "preempt", twice)


@mutant("decode_share")
def decodes_are_owed_nothing(patch: Patch) -> None:
    """Chunks come first as long as there are any."""
    patch.setattr(Turns, "decode_owed", property(lambda self: False))


@mutant("prefill_share")
def decodes_are_owed_everything(patch: Patch) -> None:
    """Once it was their turn, it is theirs for good."""
    patch.setattr(Turns, "took", lambda self, *, prefill, ready: setattr(self, "_prefills", self._prefills + prefill))


@mutant("decode_share")
def rows_are_left_out_of_mixed_steps(patch: Patch) -> None:
    """The newest row decodes only in steps without chunks."""

    def mixed(old: Any, self: Planner, now: float, *only: Any) -> tuple[list[Any], Decodes]:
        segments, decodes = old(self, now, *only)
        return segments, decodes.without(decodes.rows[-1:]) if segments else decodes

    put(patch, Planner, "_mixed", mixed)


@mutant("starved", scene=two_long_prompts)
def work_is_not_counted(patch: Patch) -> None:
    """Of two tenants with prompts the one that came first has the whole budget."""
    patch.setattr(FairShare, "charge", lambda self, tenant, tokens: None)


@mutant("robbed")
def anybody_gives_way_to_another_tenant(patch: Patch) -> None:
    """Also those that hold less."""

    def everybody(self: Holdings, newcomer: Req, rows: Ints) -> list[Req]:
        return [req for req in self._running.owners(rows) if req.tenant != newcomer.tenant]

    patch.setattr(Holdings, "giving_way", everybody)


@mutant("robbed", scene=pages_run_out)
def the_last_of_all_gives_way_for_pages(patch: Patch) -> None:
    """As if all were of one tenant."""
    patch.setattr(Holdings, "loser", lambda self, members, settled: max(members, key=self._policy.key))


@mutant("kept_out", scene=every_row_is_taken)
def no_tenant_gives_way(patch: Patch) -> None:
    """Who holds every row keeps them until its outputs end."""
    patch.setattr(Holdings, "giving_way", lambda self, newcomer, rows: [])
