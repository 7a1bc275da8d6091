"""One front-end process as the engine's process sees it: alive as long as it sends something."""

from __future__ import annotations

import logging
import time
from asyncio.subprocess import Process

from service.frontends.heartbeat import DEAD_SECONDS, Silence
from service.frontends.host import FrontEndHost

log = logging.getLogger(__name__)

START_SECONDS = 60.0
"""Seconds until a front end must listen. It sends nothing while it imports and binds."""


class FrontEnd:
    """The process, and the `FrontEndHost` that serves its connection."""

    def __init__(self, host: FrontEndHost, process: Process) -> None:
        self.host, self.process, self.since = host, process, time.monotonic()
        self._silence = Silence(lambda: host.link.heard, self.since)

    def kill(self) -> None:
        """End the process at once, with SIGKILL. No-op if it has ended."""
        if self.process.returncode is None:
            self.process.kill()

    def look(self, now: float) -> None:
        """Kill the process if it has sent nothing for too long: START_SECONDS until it listens, then DEAD_SECONDS.

        A process that is stopped or hangs accepts its share of the connections and answers none of them. It is killed
        with SIGKILL, since such a process handles no other signal. A process that has ended is started again by
        `FrontEndGroup._keep`, and nothing is done here.
        """
        if self.process.returncode is not None:
            return
        silent = self._silence.look(now)
        if silent > (DEAD_SECONDS if self.host.listening.is_set() else START_SECONDS):
            log.error("front end %d has said nothing for %.0f seconds; it is killed", self.process.pid, silent)
            self.kill()
