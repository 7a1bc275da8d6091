"""Shows the progress of loading: on a terminal a line that is redrawn, on any other output one line per stage.

Bytes that come over a network may take hours, so that of them any other output gets a line now and then.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import TextIO

from service.process.sizes import shown_of

BAR_WIDTH = 30
REDRAW_SECONDS = 0.1
LINE_SECONDS = 10.0
"""Least time between two lines about the bytes of one stage, where there is no terminal."""


class TerminalProgress:
    """Called as `progress(stage, fraction)` from any thread; `close` ends the line."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty()
        self._lock = threading.Lock()
        self._stage = ""
        self._began = self._drawn = 0.0

    def __call__(self, stage: str, fraction: float) -> None:
        """Show that `stage` is done to `fraction`, 0 to 1."""
        with self._lock:
            self._show(stage, fraction, f"{fraction:4.0%}", "")

    def bytes_came(self, stage: str, count: int, total: int) -> None:
        """Show that of `stage` there are `count` bytes of `total`."""
        told = shown_of(count, total)
        with self._lock:
            self._show(stage, count / max(1, total), told, told)

    def _show(self, stage: str, fraction: float, told: str, line: str) -> None:
        """`told` behind a bar on a terminal, `line` elsewhere if it is not empty."""
        now = time.monotonic()
        if stage != self._stage:
            self._finish(now)
            self._stage, self._began, self._drawn = stage, now, 0.0
            if not self._live:
                self._drawn = now
                print(f"{stage} ...", file=self._stream, flush=True)
        if self._live and (now - self._drawn >= REDRAW_SECONDS or fraction >= 1.0):
            self._drawn = now
            filled = round(BAR_WIDTH * min(max(fraction, 0.0), 1.0))
            bar = "#" * filled + "." * (BAR_WIDTH - filled)
            print(f"\r\x1b[K{stage} [{bar}] {told}", end="", file=self._stream, flush=True)
        elif line and not self._live and now - self._drawn >= LINE_SECONDS:
            self._drawn = now
            print(f"{stage}: {line}", file=self._stream, flush=True)

    def close(self) -> None:
        """End the line of the last stage."""
        with self._lock:
            self._finish(time.monotonic())
            self._stage = ""

    def _finish(self, now: float) -> None:
        if self._stage and self._live:
            print(f"\r\x1b[K{self._stage}: {now - self._began:.1f} s", file=self._stream, flush=True)
