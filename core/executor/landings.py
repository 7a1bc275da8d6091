"""Tells the event loop which copies to host memory have landed, so that their leases end."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

from core.device.event import Event


class Landings:
    """Waits for each copy in its order, on a thread of its own: the results of steps do not wait behind one.

    A copy that has landed when it arrives (always so on the CPU) needs no thread.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._landed: deque[int] = deque()
        self._queue: SimpleQueue[tuple[int, Event] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        """What ended the thread before `stop`."""

    def bring(self, number: int, landed: Event) -> None:
        """Copy `number` was begun, and has landed once `landed` fires. Forward thread only."""
        if self._thread is None and landed.query():
            self._tell(number)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._wait, name="slipstream-landings", daemon=True)
            self._thread.start()
        self._queue.put((number, landed))

    def take(self) -> list[int]:
        """Copies that have landed since the last call. Raises what ended the thread. Loop thread only."""
        if self._failure is not None:
            raise self._failure
        taken = list[int]()
        while self._landed:
            taken.append(self._landed.popleft())
        return taken

    def stop(self) -> None:
        """Wait for what was brought, and end the thread. Idempotent."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _wait(self) -> None:
        try:
            while (brought := self._queue.get()) is not None:
                number, landed = brought
                landed.synchronize()
                self._tell(number)
        except BaseException as error:
            # With no step in flight nothing else tells of a lost device, and requests may wait for leased pages only.
            self._failure = error
            self._wake()

    def _tell(self, number: int) -> None:
        self._landed.append(number)
        self._wake()
