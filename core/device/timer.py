"""How long the device worked on a step, and how long it waited before it."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch


class Mark(Protocol):
    """A point in device time. `at` is the host's clock at that point, None where only the device knows it."""

    @property
    def at(self) -> float | None: ...

    def seconds_since(self, earlier: Mark) -> float:
        """Device seconds from `earlier` to here, on one stream; waits until this point was passed."""
        ...


class HostMark:
    """The CPU runs operations where they are called, so the host's clock is the device's."""

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
        # A step's copies can be done while its forward stream still stashes; elapsed_time refuses an event to come.
        self.event.synchronize()
        return float(earlier.event.elapsed_time(self.event)) / 1000.0


def mark(device: torch.device) -> Mark:
    """A mark at this point of the current stream of `device`."""
    return CudaMark() if device.type == "cuda" else HostMark()
