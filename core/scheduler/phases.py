"""Where the time of a scheduler step goes: the clock is read at its start and after each phase, never per request."""

from __future__ import annotations

import time
from collections.abc import Callable

from core.lanes import PHASES, LaneRecorder


class PhaseClock:
    """Adds up the seconds of each phase, and writes each into a lane while a recording runs. Loop thread only."""

    __slots__ = ("_clock", "_lanes", "_last", "seconds")

    def __init__(self, lanes: LaneRecorder, clock: Callable[[], float] = time.monotonic) -> None:
        self._lanes = lanes
        self._clock = clock
        self._last = 0.0
        self.seconds = [0.0] * len(PHASES)

    def begin(self) -> None:
        """A call of `Scheduler.step` begins."""
        self._last = self._clock()

    def done(self, phase: int, step: int, tokens: int = 0) -> None:
        """Count the time since the last call as `phase`, an index of `PHASES`.

        For a recording: `step` is the number of the device's step that it was for, `tokens` the tokens of that step.
        """
        now = self._clock()
        self.seconds[phase] += now - self._last
        recording = self._lanes.recording
        if recording is not None:
            recording.scheduler.add(self._last, now, step, phase, tokens)
        self._last = now

    def by_name(self) -> dict[str, float]:
        """Seconds spent in each phase since the engine was built, by name."""
        return dict(zip(PHASES, self.seconds))
