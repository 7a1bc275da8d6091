"""The audit log: each event is one line of JSON, to the logger `slipstream.audit`, whatever `--log-level` says.

Callers decide which events to write: `service.access.audit` for calls, `service.metrics.trace` for traces.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

log = logging.getLogger("slipstream.audit")
# Set here, so that an operator that silences other logs still gets the acts of callers.
log.setLevel(logging.INFO)

QUIET_SECONDS: Final = 10.0
"""Seconds in which lines with the same key are written once."""
MOST_LINES: Final = 30
"""Most lines of one `Floods` within QUIET_SECONDS, of all keys together."""
MOST_KEYS: Final = 1024
"""Keys that one `Floods` remembers."""


def write(event: str, **facts: Any) -> None:
    """Write one line. Facts that are None are left out."""
    log.info("%s", json.dumps({"event": event, **{name: fact for name, fact in facts.items() if fact is not None}}))


class Floods:
    """Decides which of many similar lines are written. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._latest: OrderedDict[tuple[str, ...], float] = OrderedDict()
        self._window, self._written = clock(), 0
        self._left_out = 0

    def admits(self, *key: str) -> bool:
        """Whether to write a line for `key` now. A line that is not written is counted as left out."""
        with self._lock:
            now = self._clock()
            if now - self._window >= QUIET_SECONDS:
                self._window, self._written = now, 0
            latest = self._latest.get(key)
            if self._written >= MOST_LINES or (latest is not None and now - latest < QUIET_SECONDS):
                self._left_out += 1
                return False
            self._written += 1
            self._latest[key] = now
            self._latest.move_to_end(key)
            while len(self._latest) > MOST_KEYS:
                self._latest.popitem(last=False)
            return True

    def take_left_out(self) -> int | None:
        """The number of lines left out since the last call; None for none."""
        with self._lock:
            left_out, self._left_out = self._left_out, 0
            return left_out or None
