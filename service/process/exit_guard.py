"""Ends a process whose work is done, also if a thread is stuck.

At exit the interpreter waits for its threads, and asyncio for its pool, longer than an operator would wait.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Mapping
from types import FrameType

log = logging.getLogger(__name__)

EXIT_SECONDS = 5.0
"""Seconds for the code that runs at the end of a process; it usually takes a tenth of a second."""
FORCE_SECONDS = 5.0
"""Seconds after that, until the kernel ends the process by SIGALRM. That is for a thread that never releases the
interpreter, beside which no other thread runs."""


def leave_within(code: int, seconds: float = EXIT_SECONDS) -> None:
    """Give the process `seconds` to end by itself; then it is ended with exit code `code`. Main thread only."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds + FORCE_SECONDS)
    threading.Thread(target=_end, args=(code, seconds), name="slipstream-exit", daemon=True).start()


def _end(code: int, seconds: float) -> None:
    threading.Event().wait(seconds)
    log.error("the process did not end within %g s of its work, held up by %s; exiting", seconds, _held_up_by())
    logging.shutdown()
    os._exit(code)


def _held_up_by() -> str:
    """The names of the threads that the interpreter waits for, each with the line that it executes."""
    frames: Mapping[int, FrameType] = sys._current_frames()
    main = threading.main_thread()
    stuck = [each for each in threading.enumerate() if not each.daemon and each is not main] or [main]
    return ", ".join(f"{each.name} ({_line(frames.get(each.ident or 0))})" for each in stuck)


def _line(frame: FrameType | None) -> str:
    return "ended" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
