"""The events for open pages: made when one is due, at most once for all pages, on the threads that serve them."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from types import TracebackType

from core.lanes import LaneRecorder, Recording
from service.config.server_config import ServerConfig
from service.engine.handle import EngineHandle
from service.page.moment import moment
from service.page.streams import StreamTable

PERIOD_SECONDS = 0.25
"""Seconds between two events of one page."""
MAX_WATCHERS = 8
"""Open pages at once. They are connections of the metrics port, and half of those are left to scrapers."""

RETRY_MILLISECONDS = 1000
"""Time after which a browser comes back to a server that closed the connection."""


class Feed:
    """Gives events to watchers, which are open pages. Lanes are recorded only while there is a watcher. Thread-safe."""

    def __init__(
        self, handle: EngineHandle, config: ServerConfig, version: str, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._handle, self._config, self._version = handle, config, version
        self._streams = StreamTable(handle, loop)
        self._closed = threading.Event()
        self._lock = threading.Lock()
        """Guards the number of watchers and the recording."""
        self._watchers = 0
        self._lanes: LaneRecorder | None = None
        self._recording: Recording | None = None
        self._turn = threading.Lock()
        """Held while an event is made: one watcher's thread makes it, the others wait about a millisecond."""
        self._event, self._made_at = b"", float("-inf")

    @property
    def watchers(self) -> int:
        """Number of watchers now."""
        return self._watchers

    def watch(self) -> Watcher | None:
        """A place for one more watcher, to be used with `with`; None if all are taken or the server is closing."""
        with self._lock:
            if self._watchers == MAX_WATCHERS or self._closed.is_set():
                return None
            self._watchers += 1
        return Watcher(self, self._closed)

    def leave(self) -> None:
        """Give back a watcher's place; the last one ends the recording."""
        with self._lock:
            self._watchers -= 1
            if not self._watchers and self._lanes is not None:
                self._lanes.stop()
                self._lanes = self._recording = None

    def close(self) -> None:
        """End every watcher's events, and accept no new watcher."""
        self._closed.set()

    def newest(self) -> bytes:
        """The newest event: one that another watcher got within the last half period, or a new one."""
        with self._turn:
            if time.monotonic() - self._made_at > PERIOD_SECONDS / 2:
                seen = self._streams.look()
                now = moment(self._handle, self._config, self._version, seen, self._record())
                self._event = b"data: " + json.dumps(now, separators=(",", ":")).encode() + b"\n\n"
                self._made_at = time.monotonic()
            return self._event

    def _record(self) -> Recording | None:
        """The recording; None without an engine or a watcher. The first call with both begins it."""
        with self._lock:
            if self._recording is None and self._watchers and self._handle.engine is not None:
                self._lanes = self._handle.engine.lanes
                self._recording = None if self._lanes is None else self._lanes.start()
            return self._recording


class Watcher:
    """One open page: iterate over its events within `with`."""

    def __init__(self, feed: Feed, closed: threading.Event) -> None:
        self._feed, self._closed = feed, closed

    def __enter__(self) -> Watcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._feed.leave()

    def __iter__(self) -> Iterator[bytes]:
        """Events, one each PERIOD_SECONDS, until the server closes. Blocks between them."""
        yield b"retry: %d\n\n" % RETRY_MILLISECONDS
        while True:
            yield self._feed.newest()
            if self._closed.wait(PERIOD_SECONDS):
                return
