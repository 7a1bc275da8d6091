"""Shows the progress of loading: on a terminal a line that is redrawn, on any other output one line per stage."""

from __future__ import annotations

import sys
import threading
import time
from typing import TextIO

BAR_WIDTH = 30
REDRAW_SECONDS = 0.1


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
        now = time.monotonic()
        with self._lock:
            if stage != self._stage:
                self._finish(now)
                self._stage, self._began, self._drawn = stage, now, 0.0
                if not self._live:
                    print(f"{stage} ...", file=self._stream, flush=True)
            if self._live and (now - self._drawn >= REDRAW_SECONDS or fraction >= 1.0):
                self._drawn = now
                filled = round(BAR_WIDTH * min(max(fraction, 0.0), 1.0))
                bar = "#" * filled + "." * (BAR_WIDTH - filled)
                print(f"\r\x1b[K{stage} [{bar}] {fraction:4.0%}", end="", file=self._stream, flush=True)

    def close(self) -> None:
        """End the line of the last stage."""
        with self._lock:
            self._finish(time.monotonic())
            self._stage = ""

    def _finish(self, now: float) -> None:
        if self._stage and self._live:
            print(f"\r\x1b[K{self._stage}: {now - self._began:.1f} s", file=self._stream, flush=True)
