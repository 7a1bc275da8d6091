"""Finds a step that never comes back: steps are in flight, and no new result arrives. And a rank that is gone.

It adds up the time between its looks instead of reading how late the clock is. A process that was stopped (SIGSTOP, a
suspended machine, a frozen container) continues with its clock far ahead, and the step in flight has not had that time
either. So one look adds at most two periods, however late it comes.
"""

from __future__ import annotations

import logging

from core.engine.ranks import RankLost, Ranks

logger = logging.getLogger(__name__)

PERIOD = 1.0
"""Seconds between two looks."""
MOST_PER_LOOK = 2 * PERIOD
"""Seconds that one look can add."""


class Watchdog:
    """Decides that the device hangs: more than `limit` seconds without a new result while steps were in flight."""

    def __init__(self, limit: float, now: float, ranks: Ranks | None = None) -> None:
        """`limit`: seconds. `now`: `time.monotonic` seconds. `ranks`: other processes of the engine."""
        self._limit = limit
        self.ranks = ranks
        """None for an engine of one process."""
        self._looked_at = now
        self._step = -1
        self.waited = 0.0
        """Seconds counted so far without a new result."""

    def told(self, cause: BaseException) -> BaseException:
        """Log why the engine died, and return that: a rank that is gone, where `cause` is what came of it."""
        why = cause if self.ranks is None else self.ranks.blamed(cause)
        # A library says much of a connection, and not which rank was at its other end.
        trace = why if why is cause and not isinstance(why, RankLost) else None
        logger.critical("the engine died: %s: %s", type(why).__name__, why, exc_info=trace)
        return why

    def hangs(self, now: float, newest_step: int, in_flight: int) -> bool:
        """Look once; returns whether the device hangs. `newest_step`: number of the step whose result came last.

        Only results count as progress, because requests keep arriving while a device hangs. Raises RankLost when
        another process of the engine has ended: a step in flight may wait for it, and the next one would.
        """
        if self.ranks is not None:
            self.ranks.check()
        passed, self._looked_at = min(now - self._looked_at, MOST_PER_LOOK), now
        if newest_step != self._step or not in_flight:
            self._step, self.waited = newest_step, 0.0
        else:
            self.waited += passed
        return self.waited > self._limit
