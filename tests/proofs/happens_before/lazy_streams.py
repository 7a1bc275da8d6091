"""A device whose streams run late: work is queued per stream and runs when somebody waits, in an order the seed picks.

Within a stream work keeps its order, across streams only events order it, as on an accelerator. So a missing wait is
not only reported: it computes something else.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from core.device.fetch import fetch_together
from core.device.recorder import Recorder
from core.device.streams import COPY, FORWARD, TRANSFER, DeviceStreams
from tests.proofs.happens_before.lazy_ops import LazyOps

DEFAULT = "default stream"

SPEEDS = (1, 20, 400)
"""How fast a stream may be beside others."""

EAGERNESS = (0.0, 0.02, 0.3)
"""How likely the device is to go on, each time that work is submitted; 0 runs nothing before somebody waits."""


@dataclass(frozen=True, slots=True)
class Point:
    """The `count` oldest pieces of work of a stream."""

    lane: LazyStream
    count: int

    @property
    def is_passed(self) -> bool:
        return self.lane.done >= self.count


class LazyStream:
    """Work in submission order: an operation, or a point of another stream that must be passed first."""

    def __init__(self, name: str, speed: int) -> None:
        self.name = name
        self.speed = speed
        self.waiting: deque[Callable[[], object] | Point] = deque()
        self.submitted = 0
        self.done = 0

    def push(self, work: Callable[[], object] | Point) -> None:
        self.waiting.append(work)
        self.submitted += 1

    @property
    def can_go_on(self) -> bool:
        """Something is queued, and it does not wait for another stream."""
        if not self.waiting:
            return False
        head = self.waiting[0]
        return not isinstance(head, Point) or head.is_passed


class LazyDevice:
    """All streams, and the dice. One lock: whoever waits makes the device run, on their own thread.

    `interrupt` is called after each recording of an event, where another thread may come in between.
    """

    def __init__(self, seed: int, eagerness: float | None) -> None:
        self._rng = random.Random(seed)
        self._eagerness = self._rng.choice(EAGERNESS) if eagerness is None else eagerness
        self._lock = threading.RLock()
        self.streams: list[LazyStream] = []
        self.interrupt: Callable[[], None] = _nobody
        self._failure: Exception | None = None

    def new_stream(self) -> LazyStream:
        """Fast or slow, as the dice say."""
        self.streams.append(LazyStream(f"stream {len(self.streams)}", self._rng.choice(SPEEDS)))
        return self.streams[-1]

    def submit(self, stream: LazyStream, work: Callable[[], object] | Point) -> None:
        """Queue behind what the stream has."""
        with self._lock:
            stream.push(work)
            while self._rng.random() < self._eagerness and self._go_on():
                pass

    def wait_until(self, point: Point) -> None:
        """Run until it is passed; a failure of any operation surfaces here, as it does on an accelerator."""
        with self._lock:
            while not point.is_passed and self._failure is None:
                assert self._go_on(), "every stream waits for another one"
            if self._failure is not None:
                raise self._failure

    def nap(self) -> None:
        """Run a random piece of what is queued."""
        with self._lock:
            for _ in range(self._rng.choice((0, 3, 30, 300))):
                if not self._go_on():
                    return

    def _go_on(self) -> bool:
        """Run one piece of work of a random stream that can; whether there was one."""
        ready = [stream for stream in self.streams if stream.can_go_on]
        if not ready or self._failure is not None:
            return False
        (stream,) = self._rng.choices(ready, [stream.speed for stream in ready])
        work = stream.waiting.popleft()
        if not isinstance(work, Point):
            try:
                with _disable_current_modes(), torch.inference_mode():
                    work()
            except Exception as error:
                self._failure = error
        stream.done += 1
        return True


class LazyEvent:
    """`core.device.streams.Event` on such a device. Not recorded yet, it is passed and waits for nothing."""

    def __init__(self, device: LazyDevice) -> None:
        self._device = device
        self._point: Point | None = None

    def record(self, stream: LazyStream) -> None:
        self._point = Point(stream, stream.submitted)
        self._device.interrupt()

    def query(self) -> bool:
        return self._point is None or self._point.is_passed

    def synchronize(self) -> None:
        if self._point is not None:
            self._device.wait_until(self._point)

    def wait(self, stream: LazyStream) -> None:
        if self._point is not None:
            self._device.submit(stream, self._point)


class LazyModule:
    """As much of a device module, `torch.cuda` say, as `DeviceStreams` uses."""

    def __init__(self, device: LazyDevice, recorder: Recorder | None) -> None:
        self.device = device
        self._recorder = recorder

    def Stream(self) -> LazyStream:
        return self.device.new_stream()

    def Event(self) -> LazyEvent:
        return LazyEvent(self.device)

    def stream(self, stream: LazyStream) -> AbstractContextManager[Any]:
        def submit(work: Callable[[], object]) -> None:
            self.device.submit(stream, work)

        def drain() -> None:
            self.device.wait_until(Point(stream, stream.submitted))

        return LazyOps(submit, drain, self._recorder)

    def synchronize(self) -> None:
        for stream in self.device.streams:
            self.device.wait_until(Point(stream, stream.submitted))


class LazyStreams(DeviceStreams):
    """The production streams over a lazy module; copies to the host are copies, as they are on an accelerator."""

    def __init__(self, seed: int, recorder: Recorder | None = None, eagerness: float | None = None) -> None:
        super().__init__(torch.device("cpu"), recorder)
        self.lazy = LazyDevice(seed, eagerness)
        self._module = LazyModule(self.lazy, recorder)
        self.forward, self.copy, self.transfer = (self._module.Stream() for _ in range(3))
        self.default = self._module.Stream()
        self.forward.name, self.copy.name, self.default.name = FORWARD, COPY, DEFAULT
        self.transfer.name = TRANSFER

    @property
    def at_once(self) -> bool:
        """Never: compiled code, which does its work where it is called, would read what is not there yet."""
        return False

    def on_default(self) -> AbstractContextManager[Any]:
        """Where everything goes that names no stream: on an accelerator, the making of pools."""
        return self._on(self.default, DEFAULT)

    def fetch(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        def poisoned_bytes(size: int) -> torch.Tensor:
            """Bytes that are no number to floats, and -1 to whole numbers."""
            with _disable_current_modes():
                return torch.full((size,), 255, dtype=torch.uint8)

        return fetch_together(tensors, poisoned_bytes)


def _nobody() -> None:
    """No other thread to let in."""
