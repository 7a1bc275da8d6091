"""A machine of an engine that is not the first: it serves nothing, and ends when the first one does."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from typing import Final

from core.config import EngineConfig
from service.checkpoints.fetching import fetched
from service.cli.progress import TerminalProgress

log = logging.getLogger(__name__)

EXIT_LEADER_LOST: Final = 1
STOPPING: Final = (signal.SIGTERM, signal.SIGINT)


def follow(config: EngineConfig) -> int:
    """Be the ranks of this machine until rank 0 ends. Returns the exit code. Raises StartupError."""
    from core.engine.ranks import follow_leader

    signals = Signals()
    signals.heed()
    nodes, progress = config.nodes, TerminalProgress()
    config = fetched(config, progress)
    progress.close()
    log.info("machine %d of %d waits for rank 0 at %s", nodes.node_rank, nodes.nnodes, nodes.master_addr)

    def joined() -> None:
        signals.joined.set()
        log.info("all %d ranks have met", config.model.ranks)

    ended = follow_leader(config, joined)
    log.info("rank 0 has ended, and so does this machine" if ended else "rank 0 is gone; exiting")
    return 0 if ended else EXIT_LEADER_LOST


class Signals:
    """SIGTERM and SIGINT, heard by a thread of their own: the main one is in calls that no signal interrupts.

    Before all ranks have met the first signal ends this process. After that rank 0 drains, as its own signal tells it,
    and needs this rank meanwhile: the first signal here changes nothing, a second one ends the process at once.
    """

    def __init__(self) -> None:
        self.joined = threading.Event()

    def heed(self) -> None:
        """From now on. Main thread only."""
        hears, tells = socket.socketpair()
        tells.setblocking(False)
        # The interpreter writes there as a signal arrives, whatever the main thread does.
        signal.set_wakeup_fd(tells.detach(), warn_on_full_buffer=False)
        for number in STOPPING:
            signal.signal(number, lambda *_: None)
        threading.Thread(target=self._hear, args=(hears,), name="slipstream-signals", daemon=True).start()

    def _hear(self, hears: socket.socket) -> None:
        number = signal.Signals(hears.recv(1)[0])
        if not self.joined.is_set():
            log.info("%s: no rank has met this one yet; exiting", number.name)
            _leave(0)
        log.info("%s: this machine ends with rank 0; a second signal ends it at once", number.name)
        number = signal.Signals(hears.recv(1)[0])
        log.warning("%s: stopping at once", number.name)
        _leave(128 + number)


def _leave(code: int) -> None:
    """End the process, whatever its main thread waits in, once what was logged is written."""
    logging.shutdown()
    os._exit(code)
