"""The stand-in for streams and graphs with events that have not fired before a thread has waited for them.

So the forward thread never finds a result of the step that it launched last, as on an accelerator.
"""

from __future__ import annotations

from typing import Any

from core.device.event import Event
from tests.support.fakes.traced_graphs import GraphStreams


class LateEvent:
    """A `core.device.event.Event`."""

    def __init__(self, event: Event) -> None:
        self._event = event
        self._awaited = False

    def record(self, stream: Any = None) -> None:
        self._event.record(stream)

    def query(self) -> bool:
        return self._awaited

    def synchronize(self) -> None:
        self._event.synchronize()
        self._awaited = True

    def wait(self, stream: Any = None) -> None:
        self._event.wait(stream)


class LateStreams(GraphStreams):
    """See the module."""

    def new_event(self) -> Event:
        return LateEvent(super().new_event())
