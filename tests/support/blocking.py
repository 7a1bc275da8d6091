"""What blocking calls left to see: their outcome, and the thread that they are made on."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

THREAD = "slipstream-client"


def threads() -> list[str]:
    """The threads of blocking clients in this process: at most one, if all is well."""
    return [each.name for each in threading.enumerate() if each.name == THREAD]


def outcome(ask: Callable[[], object]) -> BaseException | None:
    """What `ask` raises; None if it returns."""
    try:
        ask()
    except BaseException as error:
        return error
    return None


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGINT interrupts, though a shell that runs the tests beside it has them ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
