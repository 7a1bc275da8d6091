"""A point in the order of a stream, with one API on every device."""

from __future__ import annotations

from typing import Any, Protocol


class Event(Protocol):
    """A point in one stream's order. Recorded once, by its maker (law 5)."""

    def record(self, stream: Any = None) -> None:
        """Mark the point after everything submitted to `stream` so far."""

    def query(self) -> bool:
        """Whether the device has passed the point. Never waits."""

    def synchronize(self) -> None:
        """Block the calling thread until the device has passed the point."""

    def wait(self, stream: Any = None) -> None:
        """Make later work on `stream` wait for the point; the host does not block."""
