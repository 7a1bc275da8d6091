"""An HTTP/2 client that behaves badly on purpose: it opens a call and grants the server no room to answer.

Just enough of the protocol to do that: literal header fields without Huffman coding, and no reader.
"""

from __future__ import annotations

import asyncio
import struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS = 0x0, 0x1, 0x4
END_STREAM, END_HEADERS, ACK = 0x1, 0x4, 0x1
INITIAL_WINDOW_SIZE = 0x4


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """One frame."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def headers(fields: list[tuple[str, str]]) -> bytes:
    """A header block of literals that are not indexed; names and values below 127 bytes."""
    block = b""
    for name, value in fields:
        block += b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
    return block


def call_frames(stream: int, path: str, authority: str, message: bytes) -> bytes:
    """A complete request on one stream."""
    block = headers(
        [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", path),
            (":authority", authority),
            ("content-type", "application/grpc"),
            ("te", "trailers"),
        ]
    )
    body = struct.pack(">BI", 0, len(message)) + message
    return frame(HEADERS, END_HEADERS, stream, block) + frame(DATA, END_STREAM, stream, body)


class DeafClient:
    """Opens calls with a flow-control window of 0 and never reads them. The kernel's buffers stay open."""

    def __init__(self, writer: asyncio.StreamWriter, authority: str) -> None:
        self._writer = writer
        self._authority = authority
        self._next_stream = 1

    @classmethod
    async def connect(cls, port: int) -> DeafClient:
        """Connect and announce the window."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        settings = struct.pack(">HI", INITIAL_WINDOW_SIZE, 0)
        writer.write(PREFACE + frame(SETTINGS, 0, 0, settings) + frame(SETTINGS, ACK, 0, b""))
        await writer.drain()
        assert await reader.read(9), "the server answers with its settings"
        return cls(writer, f"127.0.0.1:{port}")

    async def call(self, path: str, message: bytes) -> None:
        """Open one call."""
        self._writer.write(call_frames(self._next_stream, path, self._authority, message))
        self._next_stream += 2
        await self._writer.drain()

    async def close(self) -> None:
        """Hang up."""
        self._writer.close()
        await self._writer.wait_closed()
