"""Ends a process whose work is done, also where a thread is stuck.

The interpreter waits for its threads, and asyncio for its pool, without a bound that an operator would wait for.
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
"""For what runs at the end of a process; it takes a tenth of a second."""
FORCE_SECONDS = 5.0
"""Then the kernel ends it (SIGALRM): a thread that never lets go of the interpreter stops every other one."""


def leave_within(code: int, seconds: float = EXIT_SECONDS) -> None:
    """From now on the process has `seconds` to end by itself, else it ends with `code`. Main thread only."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds + FORCE_SECONDS)
    threading.Thread(target=_end, args=(code, seconds), name="slipstream-exit", daemon=True).start()


def _end(code: int, seconds: float) -> None:
    threading.Event().wait(seconds)
    log.error("the process did not end within %g s of its work, held up by %s; exiting", seconds, _held_up_by())
    logging.shutdown()
    os._exit(code)


def _held_up_by() -> str:
    """Names of the threads that the interpreter waits for, each with the line that it is at."""
    frames: Mapping[int, FrameType] = sys._current_frames()
    main = threading.main_thread()
    stuck = [each for each in threading.enumerate() if not each.daemon and each is not main] or [main]
    return ", ".join(f"{each.name} ({_line(frames.get(each.ident or 0))})" for each in stuck)


def _line(frame: FrameType | None) -> str:
    return "ended" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
