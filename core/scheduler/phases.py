"""Where the time of a scheduler step goes, phase by phase: six readings of the clock per step, none per request."""

from __future__ import annotations

import time
from collections.abc import Callable

from core.lanes import PHASES, LaneRecorder


class PhaseClock:
    """Adds up the seconds of each phase; shows them as a lane too while somebody records. Loop thread only."""

    __slots__ = ("_clock", "_lanes", "_last", "seconds")

    def __init__(self, lanes: LaneRecorder, clock: Callable[[], float] = time.monotonic) -> None:
        self._lanes = lanes
        self._clock = clock
        self._last = 0.0
        self.seconds = [0.0] * len(PHASES)

    def begin(self) -> None:
        """A step of the scheduler begins."""
        self._last = self._clock()

    def done(self, phase: int, step: int, tokens: int = 0) -> None:
        """What happened since the last call was `phase`, an index of PHASES, in step `step` of the device."""
        now = self._clock()
        self.seconds[phase] += now - self._last
        recording = self._lanes.recording
        if recording is not None:
            recording.scheduler.add(self._last, now, step, phase, tokens)
        self._last = now

    def by_name(self) -> dict[str, float]:
        """Seconds since the start, by phase."""
        return dict(zip(PHASES, self.seconds))
