"""The recorder, which is told of every access to shared device state and of everything that orders two accesses.

In production there is none, and a hook costs one comparison of an attribute with None. Tests use a recorder that keeps
a vector clock per lane and reports each pair of conflicting accesses without an order between them. That works on any
device: the hooks report what the program asked for, not the order in which this machine happened to run it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch

from core.device.event import Event
from core.types.arrays import Ints

Places = torch.Tensor | Ints | Sequence[int]
"""Rows, slots or step ids of a buffer. A recorder may read tensors, and then waits for the device."""


class Recorder(Protocol):
    """Called on the thread that submits the work.

    A lane is a stream or a thread. Work belongs to the stream that its thread has entered last and not left; outside of
    streams it belongs to the thread itself, at once. What a thread did comes before all that it submits later.
    """

    def enter(self, lane: str) -> None:
        """The calling thread submits to stream `lane` from here on."""

    def leave(self) -> None:
        """The calling thread submits to the lane again that it had before the last `enter`."""

    def step(self, batch: object) -> None:
        """A frozen batch is about to be submitted, on the current lane, by the calling thread.

        Stands for the reads that no hook sees one by one: prompt ids, page table and KV of the rows in the batch.
        """

    def read(self, buffer: str, places: Places) -> None:
        """The current lane reads `places` of `buffer`."""

    def wrote(self, buffer: str, places: Places) -> None:
        """The current lane writes `places` of `buffer`."""

    def recorded(self, event: object, lane: str) -> None:
        """`event` now stands for everything submitted to stream `lane` so far, and for nothing it stood for before."""

    def awaited(self, event: object, lane: str) -> None:
        """What is submitted to stream `lane` from here on runs after what `event` stands for now."""

    def passed(self, event: object) -> None:
        """The calling thread knows that everything `event` stands for is done."""

    def drained(self) -> None:
        """The calling thread knows that everything submitted so far is done, on every stream."""


class RecordedEvent:
    """An event that passes every call on and tells the recorder of it."""

    def __init__(self, event: Event, recorder: Recorder, lanes: dict[Any, str]) -> None:
        """`lanes`: the names of the streams that may record it or wait for it."""
        self._event = event
        self._recorder = recorder
        self._lanes = lanes

    def record(self, stream: Any = None) -> None:
        """Mark the point after everything submitted to `stream` so far."""
        self._event.record(stream)
        self._recorder.recorded(self, self._lanes[stream])

    def query(self) -> bool:
        """Whether the point was passed; only then does it order anything for the calling thread."""
        passed = self._event.query()
        if passed:
            self._recorder.passed(self)
        return passed

    def synchronize(self) -> None:
        """Block the calling thread until the point was passed."""
        self._event.synchronize()
        self._recorder.passed(self)

    def wait(self, stream: Any = None) -> None:
        """Make later work on `stream` wait for the point."""
        self._event.wait(stream)
        self._recorder.awaited(self, self._lanes[stream])


@contextmanager
def on_lane(recorder: Recorder, lane: str, context: AbstractContextManager[Any]) -> Iterator[None]:
    """Enter `context`, which submits to stream `lane`, and tell the recorder so."""
    recorder.enter(lane)
    try:
        with context:
            yield
    finally:
        recorder.leave()
