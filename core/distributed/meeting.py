"""Where the ranks of one engine meet: a store of torch.distributed, and what makes strangers no ranks.

A store and gloo's listeners ask for nothing. On loopback that is the machine's own business. Between machines each
pair of ranks proves over its own connection that both have one secret, before anything else goes over it; a connection
that comes later belongs to no pair. What follows is not encrypted, as everywhere in this field: it belongs on a network
of the cluster's own. NCCL's connections ask for nothing at all.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from core.errors import ConfigError, StartupError

LEADER: Final = 0
HOST: Final = "127.0.0.1"
LOOPBACK: Final = "lo"
"""The interface that has it."""
JOIN_SECONDS: Final = 120.0
"""How long a rank waits for others of its machine at start."""
PAUSE: Final = 0.02
"""Seconds between two looks for them."""
INTERFACE: Final = "GLOO_SOCKET_IFNAME"
"""The variable by which gloo is told where to listen; otherwise it does so on every interface."""
_NONCE: Final = 32
_SIOCGIFADDR: Final = 0x8915
"""Asks Linux for the IPv4 address of an interface."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """One place, of one engine. A copy without `listener` can be sent to other processes."""

    port: int
    listener: socket.socket | None = None
    """Of rank 0, at `host` and `port`; None on the others, and where another process has the store."""
    host: str = HOST
    """An address."""
    secret: bytes = b""
    """Empty: none is asked for."""
    seconds: float = JOIN_SECONDS
    attempt: int = 0
    """Of the ranks, in a store that outlives them."""

    def store(self, rank: int, size: int) -> Store:
        """The store, once it is there. Raises TimeoutError, and what TCPStore raises."""
        listening = None if self.listener is None else self.listener.detach()
        if listening is None:
            self._wait_for_listener()
        made: Future[Store] = Future()

        def connect() -> None:
            try:
                place = self.host, self.port, size, listening is not None
                limit = timedelta(seconds=self.seconds)
                store = TCPStore(*place, timeout=limit, wait_for_workers=False, master_listen_fd=listening)
                made.set_result(PrefixStore(f"slipstream/{self.attempt}", store))
            except BaseException as error:
                made.set_exception(error)

        # What listens there and is no store is waited for without end.
        threading.Thread(target=connect, name="slipstream-store", daemon=True).start()
        try:
            return made.result(self.seconds)
        except FutureTimeout:
            raise TimeoutError("what answers there is no rank 0") from None

    def _wait_for_listener(self) -> None:
        """TCPStore would write pages of its own for each attempt. Raises TimeoutError."""
        end = time.monotonic() + self.seconds
        while True:
            try:
                socket.create_connection((self.host, self.port), self.seconds).close()
                return
            except OSError as error:
                if time.monotonic() > end:
                    raise TimeoutError(f"nothing answers there ({error.strerror or error})") from None
            time.sleep(PAUSE)

    def wait_for(self, ranks: Iterable[int], store: Store, check: Callable[[], None]) -> None:
        """Until each has said that it is there. Raises TimeoutError that names those which have not in time."""
        end = time.monotonic() + self.seconds
        names = [str(rank) for rank in ranks]
        while not store.check(names):
            check()
            if time.monotonic() > end:
                raise TimeoutError("no word of rank " + ", ".join(each for each in names if not store.check([each])))
            time.sleep(PAUSE)

    def listen_inside(self) -> str:
        """Have gloo listen where the others are, and nowhere else. Returns this machine's address there.

        A setting of the user's own is kept, except on loopback. Raises StartupError for a `host` without a way to it.
        """
        if self.host == HOST:
            os.environ[INTERFACE] = LOOPBACK
            return HOST
        try:
            with socket.socket(socket.AF_INET6 if ":" in self.host else socket.AF_INET, socket.SOCK_DGRAM) as asking:
                # Nothing is sent: the kernel says from where it would go.
                asking.connect((self.host, self.port))
                here: str = asking.getsockname()[0]
        except OSError as error:
            raise StartupError(f"master_addr {self.host}: {error.strerror or error}") from None
        if not os.environ.get(INTERFACE):
            os.environ[INTERFACE] = interface_of(here)
        return here

    def prove(self, group: Any = None) -> None:
        """Have each pair of ranks of `group`, all by default, prove to each other that both have the secret.

        All ranks call it at the same time. Raises StartupError where one cannot, or is silent.
        """
        if not self.secret:
            return
        rank, size = dist.get_rank(), dist.get_world_size()
        others = [other for other in range(size) if other != rank]
        drawn = {other: secrets.token_bytes(_NONCE) for other in others}
        try:
            asked = self._exchange(drawn, group)
            given = self._exchange({each: self._proof(rank, each, asked[each], drawn[each]) for each in others}, group)
        except RuntimeError as error:
            raise StartupError(f"rank {rank}: {str(error).partition(chr(10))[0]}") from error
        for other in others:
            if not hmac.compare_digest(given[other], self._proof(other, rank, drawn[other], asked[other])):
                raise StartupError(f"rank {other} has another rank_secret_file than rank {rank}, or is none of ours")

    def _proof(self, proving: int, asking: int, asked: bytes, drawn: bytes) -> bytes:
        """That rank `proving` has the secret, for the one that `asked`; it draws a number too."""
        return hmac.new(self.secret, b"%d %d " % (proving, asking) + asked + drawn, hashlib.sha256).digest()

    def _exchange(self, told: dict[int, bytes], group: Any) -> dict[int, bytes]:
        """What each of the others tells this rank, while it is `told` this; _NONCE bytes each."""
        limit = timedelta(seconds=self.seconds)
        sent = [torch.frombuffer(bytearray(each), dtype=torch.uint8) for each in told.values()]
        heard = {other: torch.zeros(_NONCE, dtype=torch.uint8) for other in told}
        works: list[Any] = [dist.isend(each, other, group=group) for other, each in zip(told, sent, strict=True)]
        works += [dist.irecv(each, other, group=group) for other, each in heard.items()]
        for work in works:
            work.wait(limit)
        return {other: each.numpy().tobytes() for other, each in heard.items()}


def interface_of(address: str) -> str:
    """The name of this machine's interface that has `address`. Raises ConfigError where none is known to."""
    for _, name in socket.if_nameindex():
        if address in _addresses(name):
            return name
    raise ConfigError(f"no interface is known to have {address}: name it in {INTERFACE}")


def _addresses(interface: str) -> list[str]:
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            told = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", interface.encode()))
            found.append(socket.inet_ntoa(told[20:24]))
        except OSError:
            pass  # it has no address of IPv4
    rows = Path("/proc/net/if_inet6")
    for row in rows.read_text().splitlines() if rows.exists() else ():
        digits, *_, name = row.split()
        if name == interface:
            found.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
    return found
