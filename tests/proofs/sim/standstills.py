"""Weights are exchanged, as far as a scheduler sees it: it is held until nothing is in flight, and then starts over.

What was computed by then means nothing any more. Its pages were freed, so a later reader of one of them is found by
what the slots hold.
"""

from __future__ import annotations

import random

from core.scheduler.scheduler import Scheduler
from tests.proofs.sim.clients import Clients
from tests.proofs.sim.story import Hits, Story, Violation

RATE, END_RATE = 0.05, 0.3
"""How likely a hold begins before a step, and how likely one ends that has come to nothing in flight."""
SPARED = 0.3
"""Of the holds are pauses: what was computed stays."""


class Standstills:
    """Of one engine of a world."""

    def __init__(self, seed: int, scheduler: Scheduler, clients: Clients, story: Story, hits: Hits) -> None:
        self._rng = random.Random(f"standstills of {seed}")
        self._scheduler, self._clients, self._story, self._hits = scheduler, clients, story, hits

    def before_step(self) -> None:
        """Begin a hold, or end the one that there is once nothing is in flight."""
        scheduler, rng = self._scheduler, self._rng
        if not scheduler.held:
            scheduler.held = rng.random() < RATE
        elif scheduler.is_still and rng.random() < END_RATE:
            if rng.random() < SPARED:
                self._hits("pause")
                self._story.note("the pause is over")
            else:
                self._start_over()
            scheduler.held = False

    def planned(self) -> None:
        """The planner is asked for a step."""
        if self._scheduler.held:
            raise Violation("held", "a step is planned while the scheduler is held")

    def finish(self) -> None:
        """Nothing is held from now on."""
        self._scheduler.held = False

    def _start_over(self) -> None:
        running = self._scheduler.running.members()
        for req in running:
            req.sink.forced += 1
        told = self._scheduler.start_over()
        if told != len(running) or len(self._scheduler.running):
            raise Violation("start_over", f"{told} of {len(running)} that ran are computed again")
        memory = self._scheduler.memory
        used = {pool.name: (pool.used, pool.cached) for pool in memory.stats() if pool.used or pool.cached}
        if used or memory.allocator.held:
            raise Violation("start_over", f"everything was given up, and {used or memory.allocator.held} is held")
        self._hits("start_over")
        self._story.note(f"other weights: {told} requests are computed again")
