"""Points in device time: how long the device worked on a step, and how long it was idle before."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch


class Mark(Protocol):
    """A point in device time. `at`: `time.monotonic` at that point, in seconds; None where only the device knows it."""

    @property
    def at(self) -> float | None: ...

    def seconds_since(self, earlier: Mark) -> float:
        """Device seconds from `earlier` to this mark, both on one stream; waits until the device has passed it."""
        ...


class HostMark:
    """A mark on the CPU, which runs operations where they are called: the host's clock is the device's."""

    def __init__(self) -> None:
        self.at = time.monotonic()

    def seconds_since(self, earlier: Mark) -> float:
        """Seconds of `time.monotonic`."""
        assert isinstance(earlier, HostMark)
        return self.at - earlier.at


class CudaMark:
    """A timing event on the current stream."""

    at = None

    def __init__(self) -> None:
        self.event: Any = torch.cuda.Event(enable_timing=True)
        self.event.record()

    def seconds_since(self, earlier: Mark) -> float:
        """Seconds between the two events, as the device measured them."""
        assert isinstance(earlier, CudaMark)
        # A step's copies can be done while its forward stream still stashes, and elapsed_time refuses a pending event.
        self.event.synchronize()
        return float(earlier.event.elapsed_time(self.event)) / 1000.0


def mark(device: torch.device) -> Mark:
    """A mark at this point of the current stream of `device`."""
    return CudaMark() if device.type == "cuda" else HostMark()
