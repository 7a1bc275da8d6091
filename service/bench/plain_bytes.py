"""Bytes from one process to another by what carries keys, and without all that is ours: what keys are compared with.

Each kind has two sides: in the process that gives, and in the one that takes.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import click
import numpy as np

from core.disagg.nixl_agent import NixlAgent
from core.disagg.over_nixl import LOOK_SECONDS

PIECE: Final = 1 << 20
"""Bytes of one call that sends, of plain sockets: of sizes from 64 KiB to 256 MiB, 1 and 4 MiB were the fastest."""
HOST: Final = "127.0.0.1"


class Given(Protocol):
    """Bytes of this process, which are given away at any time."""

    def told(self) -> dict[str, Any]:
        """What the process that takes has to know; plain values."""
        ...


class Taken(Protocol):
    """Where bytes of another process go."""

    def take(self, told: Mapping[str, Any]) -> float:
        """Seconds until all bytes are here, from before the first."""
        ...


class SocketGiven:
    """Sent by a blocking socket to each that connects."""

    def __init__(self, held: memoryview) -> None:
        self._held = held
        self._listener = socket.create_server((HOST, 0))
        threading.Thread(target=self._send_all, daemon=True).start()

    def told(self) -> dict[str, Any]:
        """See `Given`."""
        return {"port": self._listener.getsockname()[1]}

    def _send_all(self) -> None:
        while True:
            peer, _ = self._listener.accept()
            with peer:
                for begin in range(0, len(self._held), PIECE):
                    peer.sendall(self._held[begin : begin + PIECE])


class SocketTaken:
    """Received by a blocking socket, connecting included."""

    def __init__(self, held: memoryview) -> None:
        self._held = held

    def take(self, told: Mapping[str, Any]) -> float:
        """See `Taken`."""
        began = time.perf_counter()
        with socket.create_connection((HOST, told["port"])) as sock:
            left = self._held
            while len(left):
                count = sock.recv_into(left)
                if not count:
                    raise click.ClickException("the plain connection ended")
                left = left[count:]
        return time.perf_counter() - began


class NixlGiven:
    """Lent by an agent of its own, with a thread that answers reads as often as ours does."""

    def __init__(self, held: memoryview) -> None:
        self._agent = NixlAgent(loopback=True)
        ((self._address, _),) = self._agent.lend([held]).tolist()
        self._told = self._agent.told()
        threading.Thread(target=self._answer, daemon=True).start()

    def told(self) -> dict[str, Any]:
        """See `Given`."""
        return {"name": self._agent.name, "told": self._told.hex(), "address": self._address}

    def _answer(self) -> None:
        while True:
            self._agent.progress()
            time.sleep(LOOK_SECONDS)


class NixlTaken:
    """Read by an agent of its own: all in one read."""

    def __init__(self, held: memoryview) -> None:
        self._agent = NixlAgent(loopback=True)
        ((self._address, self._size),) = self._agent.lend([held]).tolist()

    def take(self, told: Mapping[str, Any]) -> float:
        """See `Taken`."""
        began = time.perf_counter()
        self._agent.meet(told["name"], bytes.fromhex(told["told"]))
        pieces = np.array([[self._address, told["address"], self._size]], np.uint64)
        read = self._agent.read(told["name"], pieces)
        while read is not None and self._agent.under_way(read):
            time.sleep(LOOK_SECONDS)
        return time.perf_counter() - began


@dataclass(frozen=True, slots=True)
class Plain:
    """One kind, by its two sides."""

    name: str
    given: Callable[[memoryview], Given]
    taken: Callable[[memoryview], Taken]


PLAIN: Final = {
    "tcp": Plain("plain sockets", SocketGiven, SocketTaken),
    "nixl": Plain("plain NIXL", NixlGiven, NixlTaken),
}
"""By transfer engine."""
