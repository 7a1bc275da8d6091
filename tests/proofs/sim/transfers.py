"""Transfers in flight: made-up readers outside the one FIFO, each with a lease on the pages of a row that decodes.

What the pages hold of tokens that the host knows was written by steps whose results are here, so it is final. Until the
lease ends nothing may overwrite it, whatever becomes of the row. A transfer tells its end, or its deadline comes.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from core.scheduler.scheduler import Scheduler
from tests.proofs.sim.device import SimExecutor
from tests.proofs.sim.story import Hits, Violation
from tests.support.page_slots import slots_of

RATE, END_RATE = 0.15, 0.12
"""How likely one begins before a step, and how likely each that tells its end is over by then."""
LATE_SHARE = 0.3
"""Of the transfers never tell their end."""
PATIENCE = 40
"""Ticks until their deadline, at most."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """What a reader must find in `slots` until its lease ends."""

    slots: list[int]
    found: list[int]
    deadline: float | None
    """None for one that tells its end."""


class Transfers:
    """Of one engine of a world."""

    def __init__(self, seed: int, scheduler: Scheduler, device: SimExecutor, hits: Hits) -> None:
        self._rng = random.Random(f"transfers of {seed}")
        self._scheduler, self._device, self._hits = scheduler, device, hits
        self._flying: dict[int, Transfer] = {}
        self._looked_at = 0.0
        """When the scheduler stepped last."""

    def __len__(self) -> int:
        return len(self._flying)

    def before_step(self, now: float, tick: float) -> bool:
        """Look at all that fly, end some, begin one; whether any ended: the loop is woken then."""
        self._look(now)
        done = [
            number for number, each in self._flying.items() if each.deadline is None and self._rng.random() < END_RATE
        ]
        for number in done:
            self._end(number)
        if self._rng.random() < RATE:
            self._begin(now, tick)
        return bool(done)

    def finish(self) -> None:
        """No transfer is left, and none begins."""
        for number in list(self._flying):
            self._end(number)

    def _look(self, now: float) -> None:
        for number, each in list(self._flying.items()):
            if number not in self._scheduler.memory.leases:
                self._hits("lease_expired")
                del self._flying[number]
                continue
            if each.deadline is not None and each.deadline <= self._looked_at:
                raise Violation("lease_kept", f"lease {number} was to end at {each.deadline:.2f}")
            held = [self._device.kv.at(slot) for slot in each.slots]
            if held != each.found:
                raise Violation("leased_page", f"lease {number} at {now:.2f}: {each.found} became {held}")
        self._looked_at = now

    def _begin(self, now: float, tick: float) -> None:
        running, memory = self._scheduler.running, self._scheduler.memory
        rows = [int(row) for row in running.order if running.has_sampled(int(row))]
        if not rows:
            return
        row = rows[int(self._rng.random() * len(rows))]
        tokens = int(running.known[row]) - 1
        slots = slots_of(memory, np.full(tokens, row), np.arange(tokens)).tolist()
        tells = self._rng.random() >= LATE_SHARE
        deadline = None if tells else now + tick * (1 + int(self._rng.random() * PATIENCE))
        number = memory.lend(row, tokens, deadline)
        self._flying[number] = Transfer(slots, [self._device.kv.at(slot) for slot in slots], deadline)
        self._hits("lease_begun")

    def _end(self, number: int) -> None:
        leases = self._scheduler.memory.leases
        self._hits("lease_freed_pages" if leases.diverted else "lease_ended")
        del self._flying[number]
        if number in leases:
            self._scheduler.memory.reclaim(number)
