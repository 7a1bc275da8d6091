"""How long the process at the other end of a link has sent nothing.

Both processes send something at least every `PERIOD` seconds from their event loop. Everything that arrives counts, a
part of a long frame too. A process is silent while one callback holds up its loop. `DEAD_SECONDS`, after which a front
end is killed, is far longer than any callback of ours. What `STALE_SECONDS` of silence cause ends with the silence.

As `core.engine.watchdog` does, this counts looks rather than the clock: one look adds at most two periods. So an
observer that was stopped itself, alone or together with the process that it observes, does not take that time for a
long silence.
"""

from __future__ import annotations

from collections.abc import Callable

PERIOD = 0.5
"""Seconds between two looks, and between two frames of a front end that has nothing else to say."""
MOST_PER_LOOK = 2 * PERIOD
"""Seconds that one look can add, however long ago the last one was."""

STALE_SECONDS = 3.0
"""Seconds of silence of the engine's process after which its front ends are not ready and refuse calls. The first frame
that arrives ends that."""

DEAD_SECONDS = 10.0
"""Seconds of silence after which a front end is killed; and after which front ends of a silent engine's process do not
report alive."""


class Silence:
    """Measures the silence of one link. `heard` counts arrivals; each `now` is a `time.monotonic()` instant."""

    def __init__(self, heard: Callable[[], int], now: float) -> None:
        self._heard = heard
        self._known, self._looked_at = heard(), now
        self._seconds = 0.0

    def look(self, now: float) -> float:
        """Seconds of silence; 0 if something arrived since the last look."""
        passed, self._looked_at = min(now - self._looked_at, MOST_PER_LOOK), now
        known, self._known = self._known, self._heard()
        self._seconds = 0.0 if known != self._known else self._seconds + passed
        return self._seconds
