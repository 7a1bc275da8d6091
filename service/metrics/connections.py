"""Connections of the metrics port: few at once; one that sends or reads nothing does not keep others out.

A request has REQUEST_SECONDS for all of it, however slowly its parts come. When all places are taken, one connection
gives way to the new one. It is chosen in three steps: (1) connections whose request is not there yet, else all; (2) of
these, those of the client with most places; (3) of these the oldest. So a client that holds connections open takes
places from itself and never from a scraper.
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
"""Threads at once, for each place. A thread whose place was taken ends when it next reads or writes, and counts until
then."""
REQUEST_SECONDS = 5.0


class Connections:
    """The open connections, at most `most`. Thread-safe; only the thread that accepts connections calls `enter`."""

    def __init__(self, most: int = MAX_CONNECTIONS) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._open: dict[socket, str] = {}
        """The client of each connection, the oldest connection first."""
        self._unheard: set[socket] = set()
        """Connections whose request is not there yet."""
        self._served: set[socket] = set()
        """Connections that have a thread, with a place or without."""

    def enter(self, connection: socket, address: str) -> bool:
        """Take a place; if none is free, that of another connection. False if too many threads have not ended yet."""
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
        """The request of `connection` is there: connections without a request now give way before it."""
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
        # Shut down and not closed, so that the victim's thread wakes up, finds no request or no reader, and ends.
        with suppress(OSError):
            victim.shutdown(SHUT_RDWR)


def _client(address: str) -> str:
    """The key of a client: its address; for IPv6 its /64 network, in which one machine can have many addresses."""
    found = ip_address(address.partition("%")[0])
    if not isinstance(found, IPv6Address) or found.ipv4_mapped is not None:
        return address
    return found.packed[:8].hex()


def hung_up_within(connection: socket, seconds: float) -> bool:
    """Wait `seconds` at most until the other side closes `connection`, or its sending half. Returns whether it did.

    On systems that do not report that (macOS), only an error or a reset ends the wait.
    """
    watch = select.poll()
    # POLLIN is left out: the body of a request, which is never read, would end the wait.
    watch.register(connection, getattr(select, "POLLRDHUP", 0))
    return bool(watch.poll(math.ceil(seconds * 1000)))


class RequestStream(io.RawIOBase):
    """The bytes that `connection` sends. REQUEST_SECONDS after its construction a read raises TimeoutError."""

    def __init__(self, connection: socket) -> None:
        self._connection = connection
        self._until = time.monotonic() + REQUEST_SECONDS

    def readable(self) -> bool:
        """True, as `io.RawIOBase` asks of a stream that is read."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read into `buffer`, as `io.RawIOBase` asks. Returns the number of bytes. Raises TimeoutError."""
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError("the request took too long")
        before = self._connection.gettimeout()
        self._connection.settimeout(left)
        try:
            return self._connection.recv_into(buffer)
        finally:
            self._connection.settimeout(before)
