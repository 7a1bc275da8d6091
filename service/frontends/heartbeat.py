"""How long the process at the other end of a link has said nothing.

Both processes send something every `PERIOD` from their event loop, and everything that arrives counts, a part of a long
frame too. A process is silent while one callback holds up its loop. `DEAD_SECONDS`, after which a front end is killed,
is far beyond any callback of ours; what follows after `STALE_SECONDS` ends with the silence.

As `core.engine.watchdog`, this counts looks rather than the clock: a look adds no more than its own period twice. An
observer that was stopped itself, or thawed together with what it observes, has not seen a long silence.
"""

from __future__ import annotations

from collections.abc import Callable

PERIOD = 0.5
"""Seconds between two looks, and between two frames of a front end that has nothing else to say."""
MOST_PER_LOOK = 2 * PERIOD

STALE_SECONDS = 3.0
"""Silence of the engine's process after which its front ends are not ready and refuse calls, until it speaks again."""

DEAD_SECONDS = 10.0
"""Silence after which a front end is killed, and after which front ends of a silent engine do not report alive."""


class Silence:
    """`heard` counts what has arrived; `now` is a `time.monotonic()` instant."""

    def __init__(self, heard: Callable[[], int], now: float) -> None:
        self._heard = heard
        self._known, self._looked_at = heard(), now
        self._seconds = 0.0

    def look(self, now: float) -> float:
        """Seconds of silence, 0 when something arrived since the last look."""
        passed, self._looked_at = min(now - self._looked_at, MOST_PER_LOOK), now
        known, self._known = self._known, self._heard()
        self._seconds = 0.0 if known != self._known else self._seconds + passed
        return self._seconds
