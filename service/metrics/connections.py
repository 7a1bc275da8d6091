"""Connections of the metrics port: few at once, and none that keeps others out by saying or by reading nothing.

A request has a time for all of it, however it trickles in. When all places are taken, a connection gives way to the new
one: one whose request is not there yet, else one that is being answered; of the client that has most places, and of
these the oldest. So a client that holds connections open takes places from itself and never from a scraper.
"""

from __future__ import annotations

import io
import math
import select
import threading
import time
from collections import Counter
from contextlib import suppress
from ipaddress import IPv6Address, ip_address
from socket import SHUT_RDWR, socket
from typing import Any

MAX_CONNECTIONS = 16
THREADS_PER_PLACE = 4
"""A thread whose place was taken ends when it next reads or writes; until then it is one of these."""
REQUEST_SECONDS = 5.0


class Connections:
    """The connections that are open. Threads of the metrics server come and go; one of them calls `enter`."""

    def __init__(self, most: int = MAX_CONNECTIONS) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._open: dict[socket, str] = {}
        """By age; the client of each."""
        self._unheard: set[socket] = set()
        """Those whose request is not there yet."""
        self._served: set[socket] = set()
        """Those that have a thread, with a place or without."""

    def enter(self, connection: socket, address: str) -> bool:
        """Take a place, another one's if none is free. False where too many threads of such have not ended yet."""
        with self._lock:
            if len(self._served) >= THREADS_PER_PLACE * self._most:
                return False
            if len(self._open) >= self._most:
                self._make_room()
            self._open[connection] = _client(address)
            self._unheard.add(connection)
            self._served.add(connection)
            return True

    def heard(self, connection: socket) -> None:
        """Its request is there: those whose are not give way first."""
        with self._lock:
            self._unheard.discard(connection)

    def leave(self, connection: socket) -> None:
        """Give the place back. Idempotent."""
        with self._lock:
            self._open.pop(connection, None)
            self._unheard.discard(connection)
            self._served.discard(connection)

    def _make_room(self) -> None:
        candidates = [connection for connection in self._open if connection in self._unheard] or list(self._open)
        counts = Counter(self._open[connection] for connection in candidates)
        most = max(counts.values())
        victim = next(connection for connection in candidates if counts[self._open[connection]] == most)
        del self._open[victim]
        self._unheard.discard(victim)
        # Its thread wakes up, finds no request or no reader, and ends.
        with suppress(OSError):
            victim.shutdown(SHUT_RDWR)


def _client(address: str) -> str:
    """Of IPv6 the network: a machine has as many addresses there as it likes."""
    found = ip_address(address.partition("%")[0])
    if not isinstance(found, IPv6Address) or found.ipv4_mapped is not None:
        return address
    return found.packed[:8].hex()


def hung_up_within(connection: socket, seconds: float) -> bool:
    """Whether the other side closes `connection`, or only its sending half, within `seconds`; returns as it does so.

    Where the system does not tell that (macOS), only an error or a reset is noticed.
    """
    watch = select.poll()
    # Not what can be read: the body of a request, which is not asked for, would end the wait.
    watch.register(connection, getattr(select, "POLLRDHUP", 0))
    return bool(watch.poll(math.ceil(seconds * 1000)))


class RequestStream(io.RawIOBase):
    """What `connection` sends, as long as REQUEST_SECONDS since it was made have not passed; then TimeoutError."""

    def __init__(self, connection: socket) -> None:
        self._connection = connection
        self._until = time.monotonic() + REQUEST_SECONDS

    def readable(self) -> bool:
        """See `io.RawIOBase`."""
        return True

    def readinto(self, buffer: Any) -> int:
        """See `io.RawIOBase`."""
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError("the request took too long")
        before = self._connection.gettimeout()
        self._connection.settimeout(left)
        try:
            return self._connection.recv_into(buffer)
        finally:
            self._connection.settimeout(before)
