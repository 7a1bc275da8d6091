"""Signs of life between machines: each rank counts on in the store, and ranks that wait for it look whether it does.

A connection to a machine that lost its power, or whose network was cut, stays open: a rank would wait for news from it
without end. On one machine the kernel closes what a process had.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final, Protocol

PERIOD: Final = 1.0
"""Seconds between two signs, and between two looks."""
SILENT_SECONDS: Final = 30.0
"""After which a rank counts as lost."""

log = logging.getLogger(__name__)


class Store(Protocol):
    """The part of torch's TCPStore that is needed here."""

    def set(self, name: str, value: str) -> None:
        """Keep `value`."""

    def get(self, name: str) -> bytes:
        """What was kept; waits for it."""


class Pulse:
    """This rank's signs, and those of the ranks that it watches."""

    def __init__(self, store: Store, rank: int, watched: Mapping[int, str]) -> None:
        """`store`: a connection of its own. `watched`: what each of these ranks is called."""
        self._store = store
        self._rank = rank
        self._watched = watched
        self._seen = dict.fromkeys(watched, b"")
        """Written by the thread that asks the store."""
        self._known = dict.fromkeys(watched, b"")
        self._silent = dict.fromkeys(watched, 0.0)
        self._looked_at = time.monotonic()
        self._ended = threading.Event()

    def start(self) -> None:
        """Give a sign each second from now on, until `stop`."""
        threading.Thread(target=self._beat, name="slipstream-pulse", daemon=True).start()

    def stop(self) -> None:
        """Idempotent; waits for nothing."""
        self._ended.set()

    def silent(self, now: float) -> str | None:
        """Look once, as often as signs come: which watched rank has given none for SILENT_SECONDS; None for none.

        `now`: `time.monotonic` seconds. One look adds at most two periods, as for `Watchdog`: a process that was
        stopped continues with its clock far ahead.
        """
        passed, self._looked_at = min(now - self._looked_at, 2 * PERIOD), now
        for rank, seen in self._seen.items():
            self._silent[rank] = 0.0 if seen != self._known[rank] else self._silent[rank] + passed
            self._known[rank] = seen
        return next((self._watched[rank] for rank, waited in self._silent.items() if waited > SILENT_SECONDS), None)

    def end_when_silent(self, end: Callable[[], None]) -> Callable[[], None]:
        """Call `end` once a watched rank is silent, from another thread: this one waits for that rank, without end.

        Returns what ends that watch: from then on the caller looks itself.
        """
        over = threading.Event()

        def watch() -> None:
            while not (self._ended.wait(PERIOD) or over.is_set()):
                if (lost := self.silent(time.monotonic())) is not None:
                    log.critical("%s has given no sign of life for %.0f s", lost, SILENT_SECONDS)
                    end()
                    return

        threading.Thread(target=watch, name="slipstream-silence", daemon=True).start()
        return over.set

    def _beat(self) -> None:
        try:
            for count in itertools.count():
                self._store.set(f"beat-{self._rank}", str(count))
                for rank in self._watched:
                    self._seen[rank] = self._store.get(f"beat-{rank}")
                if self._ended.wait(PERIOD):
                    return
        except RuntimeError as error:
            # The process with the store is gone, which ranks notice by their own connections.
            log.debug("no signs of life any more: %s", error)
