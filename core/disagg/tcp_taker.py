"""Fetches keys from an engine that is asked over TCP: see `core.disagg.tcp_giver`."""

from __future__ import annotations

import asyncio
import dataclasses
import ipaddress
import socket
from collections.abc import Callable, Sequence
from typing import Any, Final

from core.disagg import frames
from core.disagg.carrier import Receiver, StreamReceiver
from core.disagg.frames import BadFrame, Message
from core.disagg.interface import Facts, TransferFailed, Wanted
from core.disagg.line import Line
from core.disagg.transfer_thread import TransferThread
from core.disagg_config import Network

_Found = tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[Any, ...]]
CONNECT_SECONDS: Final = 5.0
"""Within which a name is resolved and a connection made."""


class TcpTaker:
    """The `Taker` that connects over TCP, to addresses in `networks` only: requests name the address."""

    def __init__(
        self,
        networks: Sequence[Network],
        secret: bytes,
        facts: Callable[[], Facts],
        timeout: float,
        receiver: Receiver | None = None,
    ) -> None:
        """`receiver`: of bytes; over TCP too if there is none."""
        self._networks, self._secret, self._facts, self._timeout = tuple(networks), secret, facts, timeout
        self._receiver = receiver or StreamReceiver()
        self._thread = TransferThread("slipstream-take")

    async def take(self, address: tuple[str, int], wanted: Wanted, parts: Sequence[memoryview]) -> int:
        """See `Taker`."""
        return await self._thread.run(lambda: self._take(address, wanted, parts))

    def settle(self, parts: Sequence[memoryview], then: Callable[[], None]) -> None:
        """See `Taker`."""
        if self._receiver.is_quiet(parts):
            then()
            return
        home = asyncio.get_running_loop()

        async def wait() -> None:
            await self._receiver.quiet(parts)
            home.call_soon_threadsafe(then)

        self._thread.begin(wait)

    def close(self) -> None:
        """See `Taker`."""
        self._thread.close()
        self._receiver.close()

    async def _take(self, address: tuple[str, int], wanted: Wanted, parts: Sequence[memoryview]) -> int:
        try:
            with await self._connected(*address) as sock:
                return await self._fetched(sock, wanted, parts)
        except TimeoutError:
            raise TransferFailed("timeout", f"nothing came of {address[0]}:{address[1]}") from None
        except (OSError, EOFError, BadFrame) as error:
            raise TransferFailed("lost", f"{address[0]}:{address[1]}: {error}") from None

    async def _connected(self, host: str, port: int) -> socket.socket:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                found = _numeric(host, port) or await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, ValueError, UnicodeError) as error:
            raise TransferFailed("unreachable", f"{host!r}: {error}") from None
        # The address that was looked at is the one that is used: a name may resolve to another one the next time.
        allowed = [each for each in found if self._is_peer(str(each[4][0]))]
        if not allowed:
            raise TransferFailed("peer_refused", f"{host!r} is not in transfer_peers")
        why: OSError | None = None
        for each in allowed:
            try:
                return await _connected_to(each)
            except OSError as error:
                why = error
        raise TransferFailed("unreachable", f"{host}:{port}: {why}")

    def _is_peer(self, address: str) -> bool:
        ip = ipaddress.ip_address(address.partition("%")[0])
        mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
        return any((mapped or ip) in network for network in self._networks)

    async def _fetched(self, sock: socket.socket, wanted: Wanted, parts: Sequence[memoryview]) -> int:
        async with asyncio.timeout(self._timeout):
            greeting = await frames.receive(sock)
        drawn, back = greeting.get("nonce"), frames.nonce()
        if greeting.get("slipstream") != frames.VERSION or not isinstance(drawn, str):
            raise BadFrame("it is no engine that prefills, or one of another version")
        asked = {"facts": dict(self._facts()), **dataclasses.asdict(wanted)}
        hello = {"asked": asked, "nonce": back, "proof": frames.proof(self._secret, "take", drawn, asked)}
        await frames.send(sock, hello)
        line = Line(sock, self._secret, back, self._timeout)
        while (said := await line.said())["status"] == "wait":
            pass
        self._refuse(said)
        cached = said.get("cached")
        if said.get("bytes") != sum(map(len, parts)) or type(cached) is not int or not 0 <= cached <= wanted.tokens:
            raise BadFrame("other bytes than were asked for")
        await self._receiver.receive(line, said, parts)
        return cached

    def _refuse(self, said: Message) -> None:
        status = said["status"]
        if status == "mismatch":
            raise TransferFailed("mismatch", f"the two engines differ in {said.get('differ')}")
        if status == "gone":
            raise TransferFailed("gone", "the keys are not there, or no more")
        if status != "ready":
            raise BadFrame(f"status {status!r}")


async def _connected_to(found: _Found) -> socket.socket:
    """Raises OSError, TimeoutError too."""
    family, kind, protocol, _, where = found
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        async with asyncio.timeout(CONNECT_SECONDS):
            await asyncio.get_running_loop().sock_connect(sock, where)
    except BaseException:
        sock.close()
        raise
    return sock


def _numeric(host: str, port: int) -> list[_Found]:
    """What `getaddrinfo` says of an address, without the thread that it runs on; nothing of a name."""
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, host)
        except (OSError, ValueError):
            continue
        return [(family, socket.SOCK_STREAM, 0, "", (host, port))]
    return []
