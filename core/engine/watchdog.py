"""Finds a step that never comes back, by its absence. Counts looks, not the clock of the wall.

A process that was stopped (SIGSTOP, a suspended machine, a frozen container) continues with its clock far ahead, and
the step in flight has not had that time either. So a look adds no more than its own period twice, however late it
comes.
"""

from __future__ import annotations

PERIOD = 1.0
"""Seconds between two looks."""
MOST_PER_LOOK = 2 * PERIOD


class Watchdog:
    """`limit`: seconds without a result, while there are steps in flight, after which the device hangs."""

    def __init__(self, limit: float, now: float) -> None:
        self._limit = limit
        self._looked_at = now
        self._step = -1
        self.waited = 0.0
        """Seconds counted so far without a new result."""

    def hangs(self, now: float, newest_step: int, in_flight: int) -> bool:
        """Look once. Only results count as progress: requests keep arriving while a device hangs."""
        passed, self._looked_at = min(now - self._looked_at, MOST_PER_LOOK), now
        if newest_step != self._step or not in_flight:
            self._step, self.waited = newest_step, 0.0
        else:
            self.waited += passed
        return self.waited > self._limit
