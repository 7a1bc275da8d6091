"""Mutants of pauses and of exchanged weights. `test_standstills` plays them."""

from __future__ import annotations

from collections.abc import Callable

from core.scheduler import lifecycle, scheduler
from core.scheduler.lifecycle import Lifecycle
from core.scheduler.scheduler import Scheduler
from tests.proofs.sim.mutants import Patch

OF_STANDSTILLS: list[tuple[str, Callable[[Patch], None]]] = []
"""(the oracle that speaks first, mutant). Checks of production that would speak first are patched away."""


def _seen_by(oracle: str) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    def enter(apply: Callable[[Patch], None]) -> Callable[[Patch], None]:
        OF_STANDSTILLS.append((oracle, apply))
        return apply

    return enter


def _unchecked(patch: Patch) -> None:
    for room in (lifecycle, scheduler):
        patch.setattr(room, "check", lambda *_, **__: None)


@_seen_by("held")
def steps_are_planned_though_held(patch: Patch) -> None:
    """A pause that pauses nothing: weights would change between a step and its relay."""
    submit = Scheduler._submit

    def goes_on(self: Scheduler, now: float) -> bool:
        if self.held and self.executor.has_room:
            self._planner.plan(now, after_idle=False, slow=False, in_flight=self.executor.in_flight)
        return submit(self, now)

    patch.setattr(Scheduler, "_submit", goes_on)


@_seen_by("start_over")
def the_cache_is_kept(patch: Patch) -> None:
    """Prefixes that the old weights have computed are found by the requests of the new ones."""
    _unchecked(patch)

    def start_over(self: Lifecycle) -> int:
        running = self.running.members()
        for req in running:
            self.retract(req, keep=False)
        return len(running)

    patch.setattr(Lifecycle, "start_over", start_over)


@_seen_by("start_over")
def the_newest_goes_on(patch: Patch) -> None:
    """One request keeps its row, and reads what the old weights wrote there."""
    _unchecked(patch)

    def start_over(self: Lifecycle) -> int:
        running = self.running.members()
        for req in running[:-1]:
            self.retract(req, keep=False)
        self.memory.flush()
        return len(running)

    patch.setattr(Lifecycle, "start_over", start_over)
