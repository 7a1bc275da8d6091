"""Messages between two engines before and after the bytes of keys: JSON with a length, and proofs of a shared secret.

Each side proves that it has the secret over a number that the other one drew, and over its own message. So neither can
be answered from a recording. The bytes of keys are not encrypted: they belong on a network of the cluster's own.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import secrets
import socket
from collections.abc import Iterable, Iterator
from typing import Any, Final

VERSION: Final = 1
MAX_FRAME: Final = 1 << 14
"""Bytes of the longest message: no engine holds more for a stranger."""
SLICE: Final = 4 << 20
"""Bytes that must go, and come, within one timeout."""
_LENGTH: Final = 4

Message = dict[str, Any]


class BadFrame(Exception):
    """What came is no message of this protocol."""


def nonce() -> str:
    """A number that no recording has."""
    return secrets.token_hex(16)


def proof(secret: bytes, side: str, drawn: str, message: Message) -> str:
    """That `side` has `secret`, and says `message` to the engine that drew `drawn`."""
    said = "\n".join((side, drawn, _text(message))).encode(errors="surrogatepass")
    return hmac.new(secret, said, hashlib.sha256).hexdigest()


def proves(given: Any, secret: bytes, side: str, drawn: str, message: Message) -> bool:
    """Whether `given` is that `proof`."""
    return isinstance(given, str) and hmac.compare_digest(
        given.encode(errors="surrogatepass"), proof(secret, side, drawn, message).encode()
    )


async def send(sock: socket.socket, message: Message) -> None:
    """Send one message, of at most MAX_FRAME bytes."""
    data = _text(message).encode()
    assert len(data) <= MAX_FRAME, "messages hold names and numbers"
    await asyncio.get_running_loop().sock_sendall(sock, len(data).to_bytes(_LENGTH, "little") + data)


async def receive(sock: socket.socket) -> Message:
    """The next message. Raises BadFrame, and EOFError where the connection ended."""
    length = int.from_bytes(await _exactly(sock, _LENGTH), "little")
    if length > MAX_FRAME:
        raise BadFrame(f"a message of {length} bytes")
    try:
        message = json.loads(await _exactly(sock, length))
    except (ValueError, RecursionError) as error:
        raise BadFrame(f"no JSON: {error}") from None
    if not isinstance(message, dict):
        raise BadFrame("no object")
    return message


def slices(parts: Iterable[memoryview]) -> Iterator[memoryview]:
    """`parts` one behind the other, in pieces of at most SLICE bytes."""
    for part in parts:
        for begin in range(0, len(part), SLICE):
            yield part[begin : begin + SLICE]


async def fill(sock: socket.socket, part: memoryview) -> None:
    """Read until `part` is full. Raises EOFError where the connection ended before."""
    loop = asyncio.get_running_loop()
    while len(part):
        count = await loop.sock_recv_into(sock, part)
        if count == 0:
            raise EOFError("the connection ended")
        part = part[count:]


async def _exactly(sock: socket.socket, count: int) -> bytes:
    data = bytearray(count)
    await fill(sock, memoryview(data))
    return bytes(data)


def _text(message: Message) -> str:
    return json.dumps(message, sort_keys=True, separators=(",", ":"))
