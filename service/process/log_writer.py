"""Writes the log from a thread of its own, so that no thread that logs waits for the reader of the log.

A pipe that is not read holds 64 KiB. When it is full, a handler that writes to it directly stops every thread that
logs, the event loop among them, and then no signal reaches the server.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from queue import SimpleQueue
from typing import Final

MAX_LINES: Final = 2048
"""Most records that wait to be written; further records are only counted."""
MAX_CHARS: Final = 8192
"""Most characters of one record with its traceback. With `MAX_LINES`, at most 16 Mi characters wait."""
FLUSH_SECONDS: Final = 1.0
"""Most seconds that `flush` waits."""


class LogWriter(logging.Handler):
    """Formats a record on the thread that logs it, and writes it to `descriptor` on its own. Never blocks or raises."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self.dropped = 0
        """Records left out so far."""
        self._descriptor = descriptor
        # `SimpleQueue` is written in C and reentrant, so a signal handler that logs cannot deadlock it. `emit` bounds
        # its length.
        self._waiting: SimpleQueue[str | threading.Event] = SimpleQueue()
        self._writing = threading.Thread(target=self._write_all, name="slipstream-log", daemon=True)
        self._writing.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue the record for the thread; if MAX_LINES wait already, only count it."""
        if self._waiting.qsize() >= MAX_LINES:
            self.dropped += 1
            return
        try:
            self._waiting.put(self.format(record)[:MAX_CHARS])
        except Exception:  # arguments that do not fit the message: `logging` itself would print that, and block
            self.dropped += 1

    def flush(self) -> None:
        """Wait until all records logged before are written, FLUSH_SECONDS at most."""
        written = threading.Event()
        self._waiting.put(written)
        written.wait(FLUSH_SECONDS)

    def _write_all(self) -> None:
        told = 0
        while True:
            waiting = self._waiting.get()
            if isinstance(waiting, threading.Event):
                waiting.set()
                continue
            self._write(waiting)
            dropped = self.dropped
            if dropped > told:
                self._write(f"... {dropped - told} records of the log were dropped: it is read too slowly")
                told = dropped

    def _write(self, text: str) -> None:
        left = memoryview(f"{text}\n".encode(errors="backslashreplace"))
        with contextlib.suppress(OSError):  # the pipe was closed at its other end
            while left:
                left = left[os.write(self._descriptor, left) :]
