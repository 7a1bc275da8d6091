"""A clock that tests move by hand, in the place of the module `time`: what a measurement says of it is exact."""

from __future__ import annotations

import types

import pytest


class HandClock:
    """Seconds, the same for all clocks. `per_look`: seconds that pass at each look."""

    def __init__(self, per_look: float = 0.0) -> None:
        self.now = 100.0
        self.per_look = per_look

    def perf_counter(self) -> float:
        self.now += self.per_look
        return self.now

    thread_time = monotonic = process_time = perf_counter

    def work(self, seconds: float) -> None:
        """Something takes so long."""
        self.now += seconds


def by_hand(patch: pytest.MonkeyPatch, module: types.ModuleType, per_look: float = 0.0) -> HandClock:
    """`module` reads the clock that is returned where it would read the machine's."""
    clock = HandClock(per_look)
    patch.setattr(module, "time", clock)
    return clock
