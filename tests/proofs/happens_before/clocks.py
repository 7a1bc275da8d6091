"""Vector clocks over lanes: names every pair of conflicting accesses that nothing orders.

A lane is a stream or a thread, a clock says of each lane how much of it is known to be over. Access B comes after
access A when B's lane knew of A's moment; two accesses to one place, one of them a write, with neither after the other
are a race, whatever order this run happened to take. The algorithm is FastTrack's with whole clocks for sanity's sake.
"""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from core.device.recorder import Places

Clock = dict[str, int]

STACK_DEPTH = 4
"""Frames of the repository's own code that a story shows."""


NOT_TOLD = (
    "/device/recorder.py",
    "/happens_before/clocks.py",
    "/happens_before/lazy_ops.py",
    "/tests/support/workers.py",
)
"""Files whose frames say nothing about who did it."""


@dataclass(frozen=True, slots=True)
class Access:
    """One lane touched places of a buffer at moment `time` of its own clock."""

    lane: str
    time: int
    writes: bool
    step: int | None
    """The step that the submitting thread was launching, or had launched last."""
    stack: str

    def __str__(self) -> str:
        step = "outside of steps" if self.step is None else f"step {self.step}"
        return f"{self.lane}, {step}: {'write' if self.writes else 'read'} in {self.stack}"


@dataclass(slots=True)
class Race:
    """Two accesses to `buffer` with no order between them; more pairs from the same two stacks only add `places`."""

    buffer: str
    first: Access
    second: Access
    places: set[int] = field(default_factory=set)

    def __str__(self) -> str:
        places = ", ".join(map(str, sorted(self.places)[:8]))
        return f"unordered: {self.buffer}[{places}]\n  {self.first}\n  {self.second}"

    def between(self, one: str, other: str) -> bool:
        """Whether these two lanes, in either order, are the ones."""
        return {self.first.lane, self.second.lane} == {one, other}


@dataclass(slots=True)
class _Cell:
    """What is remembered of one place: the last write, and each lane's last read since."""

    write: Access | None = None
    reads: dict[str, Access] = field(default_factory=dict)


class _Thread(threading.local):
    """Per thread: its own lane, the streams it has entered, the step it launches."""

    def __init__(self) -> None:
        self.lane = ""
        self.streams: list[str] = []
        self.step: int | None = None


class VectorClocks:
    """A `core.device.recorder.Recorder`. `races` is empty as long as everything it was told of is ordered."""

    def __init__(self) -> None:
        self._clocks: defaultdict[str, Clock] = defaultdict(dict)
        self._marks: dict[Hashable, Clock] = {}
        self._cells: defaultdict[str, defaultdict[int, _Cell]] = defaultdict(lambda: defaultdict(_Cell))
        self._races: dict[tuple[Hashable, ...], Race] = {}
        self._table: defaultdict[int, dict[int, int]] = defaultdict(dict)
        self._streams: set[str] = set()
        self._thread = _Thread()
        self._lock = threading.RLock()
        self.accesses = 0

    @property
    def races(self) -> list[Race]:
        """In the order in which they were found."""
        return list(self._races.values())

    @property
    def lanes(self) -> set[str]:
        """Every stream and thread that did anything."""
        return set(self._clocks)

    def story(self) -> str:
        """All races in words; empty when there are none."""
        return "\n".join(map(str, self._races.values()))

    # Lanes

    def enter(self, lane: str) -> None:
        self._streams.add(lane)
        self._thread.streams.append(lane)

    def leave(self) -> None:
        self._thread.streams.pop()

    @contextmanager
    def as_thread(self, lane: str) -> Iterator[None]:
        """Inside, the calling thread stands for another one: one test thread plays several, in an order it chooses."""
        thread = self._thread
        before = (thread.lane, thread.streams, thread.step)
        thread.lane, thread.streams = lane, []
        try:
            yield
        finally:
            thread.lane, thread.streams, thread.step = before

    def _own_lane(self) -> str:
        if not self._thread.lane:
            self._thread.lane = threading.current_thread().name
        return self._thread.lane

    def _now(self) -> tuple[str, Clock]:
        """The lane that work submitted now belongs to, and its clock, one tick on."""
        own = self._own_lane()
        lane = self._thread.streams[-1] if self._thread.streams else own
        if lane != own:
            # Submission is an order: what the thread did is over before what it submits now.
            self._learn(lane, self._clocks[own])
            self._tick(own)
        return lane, self._tick(lane)

    def _tick(self, lane: str) -> Clock:
        clock = self._clocks[lane]
        clock[lane] = clock.get(lane, 0) + 1
        return clock

    def _learn(self, lane: str, known: Clock) -> None:
        clock = self._clocks[lane]
        for other, time in known.items():
            if time > clock.get(other, 0):
                clock[other] = time

    # Order

    def recorded(self, event: object, lane: str) -> None:
        """The event stands for this point only: an earlier recording of it is lost, as on a device."""
        with self._lock:
            self._learn(lane, self._clocks[self._own_lane()])
            self._tick(self._own_lane())
            self._marks[event] = dict(self._tick(lane))
            self._tick(lane)

    def awaited(self, event: object, lane: str) -> None:
        """An event that nobody recorded orders nothing."""
        with self._lock:
            self._learn(lane, self._clocks[self._own_lane()])
            self._tick(self._own_lane())
            self._learn(lane, self._marks.get(event, {}))

    def passed(self, event: object) -> None:
        with self._lock:
            self._learn(self._own_lane(), self._marks.get(event, {}))

    def drained(self) -> None:
        with self._lock:
            for lane in self._streams:
                self._learn(self._own_lane(), self._clocks[lane])

    def sent(self, token: Hashable) -> None:
        """The calling thread hands something over: a queue's item, a thread's start or end."""
        with self._lock:
            own = self._own_lane()
            self._marks[token] = dict(self._tick(own))
            self._tick(own)

    def received(self, token: Hashable) -> None:
        """The calling thread took what was handed over."""
        self.passed(token)

    # Accesses

    def step(self, batch: Any) -> None:
        """Prompt ids, the table entries of every row, and the KV of every token before this step's own are read.

        Its own are written. The pool tells of them too, but on a lazy device it does not know its slots yet.
        """
        self._thread.step = batch.step_id
        self.read("batch", (batch.step_id,))
        staged = batch.staging.prefill_ids_cpu
        if staged is not None:
            self.read("staging", (staged.data_ptr(),))
        for row, position, slot in zip(*(each.tolist() for each in batch.table_writes.tokens()), strict=True):
            self._table[row][position] = slot
        self.read("req_to_token", batch.rows)
        for row, length in zip(batch.rows.tolist(), batch.prefix_lens.tolist()):
            self.read("kv", [self._table[row].get(position, 0) for position in range(length)])
        own = zip(batch.rows.tolist(), batch.prefix_lens.tolist(), batch.extend_lens.tolist(), strict=True)
        for row, length, more in own:
            self.wrote("kv", [self._table[row].get(position, 0) for position in range(length, length + more)])

    def read(self, buffer: str, places: Places) -> None:
        self._access(buffer, places, writes=False)

    def wrote(self, buffer: str, places: Places) -> None:
        self._access(buffer, places, writes=True)

    def _access(self, buffer: str, places: Places, *, writes: bool) -> None:
        with self._lock:
            lane, clock = self._now()
            access = Access(lane, clock[lane], writes, self._thread.step, _stack())
            cells = self._cells[buffer]
            for place in _ints(places):
                self.accesses += 1
                cell = cells[place]
                against = [cell.write, *cell.reads.values()] if writes else [cell.write]
                for earlier in against:
                    if earlier is not None and clock.get(earlier.lane, 0) < earlier.time:
                        self._found(buffer, place, earlier, access)
                if writes:
                    cell.write, cell.reads = access, {}
                else:
                    cell.reads[lane] = access

    def _found(self, buffer: str, place: int, first: Access, second: Access) -> None:
        key = (buffer, first.lane, first.stack, second.lane, second.stack)
        self._races.setdefault(key, Race(buffer, first, second)).places.add(place)


def _ints(places: Places) -> list[int]:
    if isinstance(places, torch.Tensor):
        with _disable_current_modes():
            found: list[int] = places.reshape(-1).tolist()
        return found
    return [int(place) for place in places]


def _stack() -> str:
    """The innermost frames of this repository that are not those that record."""
    names: list[str] = []
    frame = sys._getframe(2)
    while frame is not None and len(names) < STACK_DEPTH:
        path = frame.f_code.co_filename
        if ("/core/" in path or "/tests/" in path) and not path.endswith(NOT_TOLD):
            names.append(frame.f_code.co_qualname)
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(names)
