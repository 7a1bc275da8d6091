"""Looks at files from a thread, since a file system may never answer, as a network mount does whose server is gone.

The event loop asks for tokens at every call. If the file system hangs, one thread hangs with it. Callers wait for that
thread once, LOOK_SECONDS at most.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.25
"""Seconds that a call waits at most for a look, which usually takes microseconds."""
HUNG_SECONDS = 5.0
"""Seconds after which a look is logged as hung. A busy machine makes a look late too, but not by so much."""
FRESH_SECONDS = 0.005
"""Seconds in which calls share one look: handing it to a thread takes longer than the look itself."""

T = TypeVar("T")


class Looking(Protocol[T]):
    """An object with a value that a look renews; `_what` names it in the log."""

    _what: str
    _value: T


def looked_at_in_time(look: Callable[[Any], T]) -> Callable[[Any], T]:
    """Decorate a method `look` that renews `_value` and returns it, so that it runs on a thread.

    The new method returns `_value`; that is the last one if the files do not answer in time. Raises what `look` raises.
    """

    @functools.wraps(look)
    def current(self: Looking[T]) -> T:
        looks: TimedLook | None = self.__dict__.get("_looks")
        if looks is None:
            looks = self.__dict__.setdefault("_looks", TimedLook(self._what, lambda: look(self)))
        looks.renew()
        return self._value

    return current


class TimedLook:
    """Runs one look at a time on its own thread; none begins while another has not ended. Thread-safe."""

    def __init__(self, what: str, look: Callable[[], object]) -> None:
        self._what, self._look = what, look
        self._lock = threading.Lock()
        self._asked: SimpleQueue[Future[object]] = SimpleQueue()
        self._under_way: Future[object] | None = None
        self._began = 0.0
        self._late = self._told = False
        self._fresh_until = 0.0
        self._thread: threading.Thread | None = None

    def renew(self) -> None:
        """Look, unless a look ended within the last FRESH_SECONDS. Raises what the look raises.

        Returns after LOOK_SECONDS at most, and at once while a look is late.
        """
        with self._lock:
            if self._late or time.monotonic() < self._fresh_until:
                self._tell_if_hung()
                return
            asked = self._under_way or self._begin()
        try:
            asked.result(LOOK_SECONDS)
        except TimeoutError:
            with self._lock:
                self._late = self._late or self._under_way is asked
                self._tell_if_hung()

    def _tell_if_hung(self) -> None:
        """Log a look that hangs, once. The caller holds the lock."""
        if self._late and not self._told and time.monotonic() - self._began >= HUNG_SECONDS:
            self._told = True
            log.error("%s: its file system does not answer; going on with the last one", self._what)

    def _begin(self) -> Future[object]:
        if self._thread is None:
            self._thread = threading.Thread(target=self._look_all, name="slipstream-look", daemon=True)
            self._thread.start()
        asked: Future[object] = Future()
        self._under_way, self._began = asked, time.monotonic()
        self._asked.put(asked)
        return asked

    def _look_all(self) -> None:
        while True:
            asked = self._asked.get()
            error: BaseException | None = None
            try:
                self._look()
            except BaseException as raised:
                error = raised
            with self._lock:
                if self._told:
                    log.info("%s: its file system answers again", self._what)
                self._under_way, self._late, self._told = None, False, False
                self._fresh_until = time.monotonic() + FRESH_SECONDS
            if error is None:
                asked.set_result(None)
            else:
                asked.set_exception(error)
