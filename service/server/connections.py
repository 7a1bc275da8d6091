"""Connections to the gRPC ports, which gRPC itself takes without a limit: idle ones go before the descriptors are gone.

Every connection is a descriptor. When the last one is taken, no port accepts anything any more, probes and metrics
among them, until a client hangs up. grpcio can neither count its connections nor close one. So a thread asks the system
which sockets are open, which address is at the other end, and for how long nothing has come from there. It hangs up on
idle connections of the address that has most. The look takes no descriptor itself: it works when there is none left.
"""

from __future__ import annotations

import os
import resource
import socket
import struct
import threading
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from ipaddress import IPv6Address, ip_address
from typing import Any, Final
from urllib.parse import unquote

import grpc.aio

Context = grpc.aio.ServicerContext[Any, Any]

DESCRIPTORS: Final = "/proc/self/fd"
LOOK_SECONDS: Final = 0.25
IDLE_SECONDS: Final = 1.0
"""Seconds of silence before a connection without a call counts as idle: one heard of since may be about to call."""
LEAST_FREE: Final = 16
MOST_DESCRIPTORS: Final = 65_536
"""The limit on descriptors is raised to this, if the hard limit allows it."""
SILENT_SINCE: Final = struct.Struct("=52xI")
"""`tcpi_last_data_recv` in Linux's tcp_info: milliseconds since data last came."""


@dataclass(frozen=True, slots=True)
class Connection:
    """One accepted connection: its descriptor, its client's address and port, and seconds since data last came."""

    descriptor: int
    address: str
    port: int
    silent: float


def victims(open_now: Collection[Connection], busy: Collection[tuple[str, int]], most: int) -> list[Connection]:
    """The connections to close so that `most` are left. Each is the longest silent one of the address that has most.

    Idle connections go first. If they are too few, connections of addresses that have more than half of `most` go too,
    even with calls open. `busy` holds address and port of each client that has calls open. O(n log n): there can be
    MOST_DESCRIPTORS.
    """
    counts = Counter(each.address for each in open_now)
    by_silence = sorted(open_now, key=lambda each: -each.silent)
    idle = [each for each in by_silence if (each.address, each.port) not in busy and each.silent >= IDLE_SECONDS]
    # Keys of a dict: a set that keeps its order.
    found: dict[Connection, None] = {}
    for candidates, least in ((idle, 0), (by_silence, most // 2)):
        lines: defaultdict[str, deque[Connection]] = defaultdict(deque)
        for each in candidates:
            if each not in found:
                lines[each.address].append(each)
        heaviest_first = [(-counts[address], address) for address in lines]
        heapify(heaviest_first)
        while heaviest_first and len(open_now) - len(found) > most and -heaviest_first[0][0] > least:
            _, heaviest = heappop(heaviest_first)
            found[lines[heaviest].popleft()] = None
            counts[heaviest] -= 1
            if lines[heaviest]:
                heappush(heaviest_first, (-counts[heaviest], heaviest))
    return list(found)


class Connections:
    """Keeps descriptors free, on a thread that runs from `start` to `close`: it closes connections to `ports()`.

    Does nothing on systems other than Linux.
    """

    def __init__(self, ports: Callable[[], Collection[int]]) -> None:
        self._ports = ports
        self._calls: Counter[str] = Counter()
        self._closed = threading.Event()

    @asynccontextmanager
    async def around(self, _method: str, context: Context) -> AsyncIterator[None]:
        """Run a call inside; its connection is not idle meanwhile."""
        peer = context.peer()
        self._calls[peer] += 1
        try:
            yield
        finally:
            self._calls[peer] -= 1
            if not self._calls[peer]:
                del self._calls[peer]

    def start(self) -> None:
        """Raise the limit on descriptors to MOST_DESCRIPTORS, or as far as allowed, and start the thread."""
        if os.path.isdir(DESCRIPTORS):
            _raised_limit()
            threading.Thread(target=self._run, name="slipstream-connections", daemon=True).start()

    def close(self) -> None:
        """End the thread at its next look. Idempotent."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(LOOK_SECONDS):
            # Read again at each look: limits can be changed from outside.
            limit = _raised_limit()
            # The last eighth is for files, metrics and the engine: connections that reach into it give way.
            if _lowest_free(limit) >= limit - max(LEAST_FREE, limit // 8):
                self.make_room(limit)

    def make_room(self, limit: int) -> None:
        """Hang up on as many connections as it takes to have a third of `limit` descriptors free."""
        # Tried one by one: listing DESCRIPTORS would take a descriptor itself, and nearly all below the limit are open.
        descriptors = [each for each in range(limit) if _is_open(each)]
        ports = self._ports()
        found = [each for each in map(_connection, descriptors) if each is not None and each[0] in ports]
        open_now = [each for _, each in found]
        others = len(descriptors) - len(open_now)
        busy = {_end(peer) for peer in self._calls.copy()}
        for victim in victims(open_now, busy, max(0, limit * 2 // 3 - others)):
            _hang_up(victim)


def _raised_limit() -> int:
    """The limit on descriptors, after raising it towards MOST_DESCRIPTORS as far as the hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit, allowed = (MOST_DESCRIPTORS if each == resource.RLIM_INFINITY else each for each in (soft, hard))
    target = min(allowed, MOST_DESCRIPTORS)
    if limit < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
    return max(limit, target)


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _lowest_free(limit: int) -> int:
    """The lowest free descriptor, which is the least number of descriptors taken; `limit` if none is free."""
    try:
        descriptor = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return limit
    os.close(descriptor)
    return descriptor


@contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    """The socket behind a descriptor that gRPC owns, which stays open. Raises OSError for a descriptor of no socket."""
    borrowed = socket.socket(fileno=descriptor)
    try:
        yield borrowed
    finally:
        borrowed.detach()


def _connection(descriptor: int) -> tuple[int, Connection] | None:
    """For an accepted TCP connection, the local port and the connection; None for any other descriptor."""
    try:
        with _borrowed(descriptor) as opened:
            if opened.family not in (socket.AF_INET, socket.AF_INET6) or opened.type is not socket.SOCK_STREAM:
                return None
            address, port = opened.getpeername()[:2]
            info = opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, SILENT_SINCE.size)
            silent = SILENT_SINCE.unpack(info)[0] / 1000
            return opened.getsockname()[1], Connection(descriptor, _plain(address), port, silent)
    except (OSError, struct.error):
        return None


def _hang_up(victim: Connection) -> None:
    """Shut the connection down under gRPC, which then sees that its client has gone."""
    with suppress(OSError), _borrowed(victim.descriptor) as opened:
        # Checked again: gRPC may have closed the descriptor meanwhile, and the system given it to another socket.
        address, port = opened.getpeername()[:2]
        if (_plain(address), port) == (victim.address, victim.port):
            opened.shutdown(socket.SHUT_RDWR)


def _end(peer: str) -> tuple[str, int]:
    """Address and port of `ipv4:127.0.0.1:4711` or `ipv6:%5B::1%5D:4711`."""
    kind, _, rest = unquote(peer).partition(":")
    address, _, port = rest.rpartition(":")
    return (_plain(address.strip("[]")), int(port)) if kind in ("ipv4", "ipv6") else (peer, 0)


def _plain(address: str) -> str:
    """The address as text; an IPv4 address that is mapped into IPv6 in its IPv4 form."""
    parsed = ip_address(address.partition("%")[0])
    mapped = parsed.ipv4_mapped if isinstance(parsed, IPv6Address) else None
    return str(mapped or parsed)
