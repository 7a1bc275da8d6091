"""`python -m tests.support.fakes.serve_unruly ARGS`: the real command line over an engine that leaves things behind.

A prompt "stuck" leaves a thread that never ends, "hog" one that never lets go of the interpreter from the drain on,
"flood" logs 20,000 lines; all else counts up. `UNRULY_SECONDS` says how long the process may take to end, twice.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial

from core.types.io import GenerateRequest
from service.cli.cli import main
from service.cli.commands import serve
from service.engine import builder
from service.process import exit_guard
from tests.support.fakes.fake_engine import FakeEngine, Step, count_up

FLOOD = 20_000
SECONDS_ENV = "UNRULY_SECONDS"


def hog() -> None:
    """Once the process is about to leave, hold the interpreter while sleeping."""
    while not signal.getitimer(signal.ITIMER_REAL)[0]:
        time.sleep(0.01)
    ctypes.PyDLL(None).sleep(3600)


def make_engine(*_: object) -> FakeEngine:
    """An engine whose behaviour the prompt chooses."""
    engine = FakeEngine()

    def script(request: GenerateRequest) -> Iterator[Step]:
        if request.text == "stuck":
            threading.Thread(target=threading.Event().wait, name="stuck-in-a-library").start()
        if request.text == "hog":
            threading.Thread(target=hog).start()
        if request.text == "flood":
            for number in range(FLOOD):
                logging.getLogger("flood").error("line %d %s", number, "x" * 80)
        yield from count_up(request)

    engine.script = script
    return engine


def hurry(seconds: float) -> None:
    """Have the product's own bounds on the end of its process be `seconds` each."""
    serve.leave_within = partial(exit_guard.leave_within, seconds=seconds)
    exit_guard.FORCE_SECONDS = seconds


if __name__ == "__main__":
    if SECONDS_ENV in os.environ:
        hurry(float(os.environ[SECONDS_ENV]))
    builder.build_core_engine = make_engine
    main()
