"""Writes the log from a thread of its own, so that no thread that logs waits for the reader of the log.

A pipe that is not read holds 64 KiB; a handler that writes to it directly stops every thread that logs, the event loop
among them, and a server that no signal reaches.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from queue import SimpleQueue
from typing import Final

MAX_LINES: Final = 2048
"""Waiting to be written; those that come when it is full are counted instead."""
MAX_CHARS: Final = 8192
"""Of one record with its traceback; with `MAX_LINES` it bounds what may wait to 16 Mi characters."""
FLUSH_SECONDS: Final = 1.0


class LogWriter(logging.Handler):
    """Formats where it is called and writes to `descriptor` on a thread. Never blocks, never raises."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self.dropped = 0
        """Records left out so far."""
        self._descriptor = descriptor
        # Of C, and safe to use from whatever interrupts it; `emit` bounds it.
        self._waiting: SimpleQueue[str | threading.Event] = SimpleQueue()
        self._writing = threading.Thread(target=self._write_all, name="slipstream-log", daemon=True)
        self._writing.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Leave the record to the thread, or count it if too many wait."""
        if self._waiting.qsize() >= MAX_LINES:
            self.dropped += 1
            return
        try:
            self._waiting.put(self.format(record)[:MAX_CHARS])
        except Exception:  # arguments that do not fit the message: `logging` itself would print that, and block
            self.dropped += 1

    def flush(self) -> None:
        """Wait until what was logged before is written, for FLUSH_SECONDS at most."""
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
