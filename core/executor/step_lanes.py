"""The device lanes of a step while a recording runs: when it was launched, computed and copied.

Marks of an accelerator are points in its own time and must be converted to host time. The host never notices a copy
before it ends. So the offset is the smallest difference between the two clocks over all steps, too large only by the
microseconds after which the fastest copy was noticed. No thread waits for the device for the sake of a recording.
"""

from __future__ import annotations

import time

from core.batch.schedule_batch import ScheduleBatch
from core.device.timer import Mark
from core.lanes import LaneRecorder, Recording


class StepLanes:
    """The marks of one step. The forward thread fills them; the thread that takes the result writes them, once."""

    __slots__ = ("_anchor", "_copied", "_copying", "_launched_at", "_recording", "_step", "_tokens")

    def __init__(self, recording: Recording, anchor: Mark, batch: ScheduleBatch, launched_at: float) -> None:
        self._recording, self._anchor = recording, anchor
        self._step, self._tokens = batch.step_id, batch.num_tokens
        self._launched_at = launched_at
        self._copying = self._copied = anchor

    def copying(self, mark: Mark) -> None:
        """`mark` is where the copies begin, on the copy stream."""
        self._copying = mark

    def copied(self, mark: Mark) -> None:
        """`mark` is where the copies end. The host has launched the whole step now, which ends its launch lane."""
        self._copied = mark
        self._recording.launch.add(self._launched_at, time.monotonic(), self._step, 0, self._tokens)

    def write(self, began: Mark, ended: Mark) -> None:
        """Add the device lanes. The step is done, so reading its device times does not wait."""
        recording, anchor, seen = self._recording, self._anchor, time.monotonic()
        copied = self._copied.seconds_since(anchor)
        offset = seen - copied if anchor.at is None else anchor.at
        recording.device_offset = min(recording.device_offset, offset)
        began_at, ended_at = began.seconds_since(anchor), ended.seconds_since(anchor)
        recording.forward.add(began_at, ended_at, self._step, 0, self._tokens)
        recording.copy.add(self._copying.seconds_since(anchor), copied, self._step, 0, self._tokens)


class StepTracer:
    """Gives a step its lanes while a recording runs. Forward thread only."""

    def __init__(self, lanes: LaneRecorder) -> None:
        self._lanes = lanes
        self._of: Recording | None = None
        self._anchor: Mark | None = None

    def begin(self, batch: ScheduleBatch, began: Mark) -> StepLanes | None:
        """The lanes of a step that began at `began`; None while no recording runs."""
        recording = self._lanes.recording
        if recording is None:
            return None
        if recording is not self._of or self._anchor is None:
            self._of, self._anchor = recording, began
        return StepLanes(recording, self._anchor, batch, time.monotonic())
