"""What each lane of the engine did when: a ring buffer per lane, filled a few times per step while a recording runs.

Without a recording, a lane costs one look at an attribute. During one, a slice is packed into memory that was allocated
when the recording began, so memory does not grow. The idea of lanes in one picture is Perfetto's.
"""

from __future__ import annotations

import struct
import threading
from typing import NamedTuple

PHASES = ("results", "intake", "plan", "submit", "publish", "emit")
"""What one call of the scheduler does, in this order; plan and submit repeat while there is room."""

RESULTS, INTAKE, PLAN, SUBMIT, PUBLISH, EMIT = range(len(PHASES))

SLICES_PER_LANE = 1 << 16
"""Newest slices that a lane keeps: minutes of small steps, 2 MiB per lane."""

_SLICE = struct.Struct("<ddqii")


class Slice(NamedTuple):
    """One piece of work: from `begin` to `end` in `time.monotonic` seconds, for `step`; `kind` is an index of PHASES in
    the scheduler's lane and 0 elsewhere, `tokens` how many the step computes (0 where that says nothing)."""

    begin: float
    end: float
    step: int
    kind: int
    tokens: int


class Lane:
    """A ring of slices with one writer."""

    __slots__ = ("_buffer", "_capacity", "_count")

    def __init__(self, capacity: int = SLICES_PER_LANE) -> None:
        self._capacity = capacity
        self._buffer = bytearray(capacity * _SLICE.size)
        self._count = 0

    def add(self, begin: float, end: float, step: int, kind: int = 0, tokens: int = 0) -> None:
        """Add one slice; once the ring is full it overwrites the oldest."""
        _SLICE.pack_into(self._buffer, self._count % self._capacity * _SLICE.size, begin, end, step, kind, tokens)
        # After the slice is packed: `slices` on another thread reads only what is counted.
        self._count += 1

    def slices(self, offset: float = 0.0, newest: int | None = None) -> list[Slice]:
        """The slices kept, oldest first, with `offset` seconds added to their times; only the last `newest` if given.

        May be called from any thread: the ring is far longer than what the writer adds during the call.
        """
        count = self._count
        kept = min(count, self._capacity if newest is None else newest)
        places = (place % self._capacity * _SLICE.size for place in range(count - kept, count))
        found = (_SLICE.unpack_from(self._buffer, place) for place in places)
        return [Slice(begin + offset, end + offset, step, kind, tokens) for begin, end, step, kind, tokens in found]


class Recording:
    """The lanes of one recording, each with one writer.

    The loop thread writes `scheduler`, the forward thread `launch`, and the thread that takes results `forward` and
    `copy`. Those two are in device time: host time is device time plus `device_offset`, in seconds.
    """

    def __init__(self, capacity: int = SLICES_PER_LANE) -> None:
        self.scheduler = Lane(capacity)
        self.launch = Lane(capacity)
        self.forward = Lane(capacity)
        self.copy = Lane(capacity)
        self.device_offset = float("inf")

    def lanes(self, since: float = 0.0) -> dict[str, list[Slice]]:
        """Slices by lane that began at `since` or later, all in `time.monotonic` seconds."""
        found = {
            "scheduler": self.scheduler.slices(),
            "launch": self.launch.slices(),
            "forward": self.forward.slices(self.device_offset),
            "copy": self.copy.slices(self.device_offset),
        }
        return {name: [each for each in slices if each.begin >= since] for name, slices in found.items()}


class LaneRecorder:
    """Where writers look whether a recording runs. `start` and `stop` may be called from any thread, in pairs."""

    __slots__ = ("_lock", "_users", "recording")

    def __init__(self) -> None:
        self.recording: Recording | None = None
        """None while no recording runs."""
        self._lock = threading.Lock()
        self._users = 0

    def start(self) -> Recording:
        """Begin a recording, or share the one that runs."""
        with self._lock:
            self._users += 1
            if self.recording is None:
                self.recording = Recording()
            return self.recording

    def stop(self) -> None:
        """End the recording once every `start` has its `stop`. A writer within a slice may still finish it."""
        with self._lock:
            self._users -= 1
            if not self._users:
                self.recording = None
