"""One front-end process as the engine's process sees it: alive as long as it says something."""

from __future__ import annotations

import logging
import time
from asyncio.subprocess import Process

from service.frontends.heartbeat import DEAD_SECONDS, Silence
from service.frontends.host import FrontEndHost

log = logging.getLogger(__name__)

START_SECONDS = 60.0
"""Until a front end listens. It says nothing while it imports and binds."""


class FrontEnd:
    """The process, and what the engine holds for it."""

    def __init__(self, host: FrontEndHost, process: Process) -> None:
        self.host, self.process, self.since = host, process, time.monotonic()
        self._silence = Silence(lambda: host.link.heard, self.since)

    def kill(self) -> None:
        """End it at once."""
        if self.process.returncode is None:
            self.process.kill()

    def look(self, now: float) -> None:
        """Kill it when it has said nothing for too long; one that has ended already is left to its replacement.

        A process that is stopped or hangs accepts its share of the connections and answers none of them. SIGKILL, since
        such a process handles no other signal.
        """
        if self.process.returncode is not None:
            return
        silent = self._silence.look(now)
        if silent > (DEAD_SECONDS if self.host.listening.is_set() else START_SECONDS):
            log.error("front end %d has said nothing for %.0f seconds; it is killed", self.process.pid, silent)
            self.kill()
