"""The table of streams, which the event loop owns and threads of the metrics port show."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from core.types.streams import StreamInfo
from service.engine.handle import EngineHandle

MAX_ROWS = 200
"""Most streams that are shown, the oldest ones; each costs the event loop some microseconds."""

ANSWER_SECONDS = 0.1
"""Seconds that a thread waits for the loop's answer; without one in time the last answer is shown with its age."""


@dataclass(frozen=True, slots=True)
class StreamsSeen:
    """At `at`, in `time.monotonic` seconds, there were `total` streams, of which `rows` are the oldest."""

    at: float
    total: int = 0
    rows: Sequence[StreamInfo] = ()


class StreamTable:
    """Asks the event loop for the open streams, one question at a time. One thread at a time may call `look`."""

    def __init__(self, handle: EngineHandle, loop: asyncio.AbstractEventLoop) -> None:
        self._handle, self._loop = handle, loop
        self._seen = StreamsSeen(time.monotonic())
        self._answered = threading.Event()
        self._answered.set()

    def look(self) -> StreamsSeen:
        """The streams now, or as of the loop's last answer. Waits ANSWER_SECONDS at most."""
        if self._answered.is_set():
            self._answered.clear()
            try:
                self._loop.call_soon_threadsafe(self._answer)
            except RuntimeError:
                # The loop is closed: the server has ended, except for this thread.
                self._answered.set()
        self._answered.wait(ANSWER_SECONDS)
        return self._seen

    def _answer(self) -> None:
        engine = self._handle.engine
        streams = None if engine is None else engine.open_streams
        try:
            if streams is not None:
                self._seen = StreamsSeen(time.monotonic(), len(streams), streams.oldest(MAX_ROWS))
            else:
                self._seen = StreamsSeen(time.monotonic())
        finally:
            self._answered.set()
