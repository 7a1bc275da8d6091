"""An HTTP/2 client that behaves badly on purpose: it opens a call and grants the server no room to answer.

Just enough of the protocol to do that: literal header fields without Huffman coding, and a reader of pings at most.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS, PING, WINDOW_UPDATE = 0x0, 0x1, 0x4, 0x6, 0x8
END_STREAM, END_HEADERS, ACK = 0x1, 0x4, 0x1
INITIAL_WINDOW_SIZE = 0x4
FRAME_BYTES = 16_384
DEFAULT_WINDOW = 65_535


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """One frame."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def headers(fields: list[tuple[str, str]]) -> bytes:
    """A header block of literals that are not indexed; names and values below 127 bytes."""
    block = b""
    for name, value in fields:
        block += b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
    return block


def call_frames(stream: int, path: str, authority: str, message: bytes, more: Sequence[tuple[str, str]] = ()) -> bytes:
    """A complete request on one stream; `more` are header fields beside the usual ones."""
    block = headers(
        [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", path),
            (":authority", authority),
            ("content-type", "application/grpc"),
            ("te", "trailers"),
            *more,
        ]
    )
    body = struct.pack(">BI", 0, len(message)) + message
    pieces = [body[at : at + FRAME_BYTES] for at in range(0, len(body), FRAME_BYTES)]
    data = b"".join(frame(DATA, 0, stream, piece) for piece in pieces[:-1])
    return frame(HEADERS, END_HEADERS, stream, block) + data + frame(DATA, END_STREAM, stream, pieces[-1])


class DeafClient:
    """Opens calls with a small flow-control window, 0 unless told, that it never widens: it reads nothing.

    The kernel's buffers stay open. A server that pings takes it for dead, unless it `answers_pings`; then it also keeps
    to the room that the server grants to the connection.
    """

    def __init__(self, writer: asyncio.StreamWriter, authority: str) -> None:
        self._writer = writer
        self._authority = authority
        self._next_stream = 1
        self._answering: asyncio.Task[None] | None = None
        self._window = DEFAULT_WINDOW
        self._widened = asyncio.Event()

    @classmethod
    async def connect(cls, port: int, window: int = 0, *, answers_pings: bool = False) -> DeafClient:
        """Connect and announce the window, in bytes per call."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        settings = struct.pack(">HI", INITIAL_WINDOW_SIZE, window)
        writer.write(PREFACE + frame(SETTINGS, 0, 0, settings) + frame(SETTINGS, ACK, 0, b""))
        await writer.drain()
        client = cls(writer, f"127.0.0.1:{port}")
        if answers_pings:
            client._answering = asyncio.create_task(client._answer(reader))
        else:
            assert await reader.read(9), "the server answers with its settings"
        return client

    async def _answer(self, reader: asyncio.StreamReader) -> None:
        while True:
            head = await reader.readexactly(9)
            payload = await reader.readexactly(int.from_bytes(head[:3], "big"))
            if head[3] == PING and not head[4] & ACK:
                self._writer.write(frame(PING, ACK, 0, payload))
            elif head[3] == WINDOW_UPDATE and not any(head[5:]):
                self._window += int.from_bytes(payload, "big")
                self._widened.set()

    async def call(self, path: str, message: bytes, more: Sequence[tuple[str, str]] = ()) -> None:
        """Open one call, of a message that fits the window of a stream."""
        self._window -= len(message) + 5
        while self._answering is not None and self._window < 0:
            self._widened.clear()
            await self._widened.wait()
        self._writer.write(call_frames(self._next_stream, path, self._authority, message, more))
        self._next_stream += 2
        await self._writer.drain()

    async def close(self) -> None:
        """Hang up."""
        if self._answering is not None:
            self._answering.cancel()
            await asyncio.gather(self._answering, return_exceptions=True)
        self._writer.close()
        await self._writer.wait_closed()
