"""Frames between the engine process and a front end: a fixed header, then JSON or, for tokens, rows of integers.

Header, little endian: body length uint32, version uint8, kind uint8, call number uint64 (0 for a frame of no call).
Reading a frame runs no code, as unpickling could. The number is outside of the body, so that a body that cannot be read
ends only the call that it belongs to. A header that cannot be read ends the connection.
"""

from __future__ import annotations

import asyncio
import json
import logging
import struct
from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import Any

log = logging.getLogger(__name__)

VERSION = 2
MAX_BODY_BYTES = 256 * 1024 * 1024
HIGH_WATER_BYTES = 1024 * 1024
"""Unsent bytes of one front end above which its tokens wait in the engine, where they are merged and bounded."""

_HEADER = struct.Struct("<IBBQ")


class Kind(IntEnum):
    """The kind of a frame. Those below 16 come from the engine, the others from front ends.

    LOADING, FAILED and ENDED come from engines of `service.replicas` only.
    """

    READY = 1
    STATE = 2
    EVENTS = 3
    REPLY = 4
    CLOSE = 5
    LOADING = 6
    FAILED = 7
    ENDED = 8
    LISTENING = 16
    SERVING = 17
    CALL = 18
    END = 19
    COUNTS = 20
    BEAT = 21


class WireError(Exception):
    """The peer speaks another version, or not this protocol; or a body is larger than MAX_BODY_BYTES."""


def pack(kind: Kind, body: bytes = b"", number: int = 0) -> bytes:
    """One frame. Raises WireError for a body of more than MAX_BODY_BYTES."""
    if len(body) > MAX_BODY_BYTES:
        raise WireError(f"a body of {len(body)} bytes; a frame holds at most {MAX_BODY_BYTES}")
    return _HEADER.pack(len(body), VERSION, kind, number) + body


def pack_json(kind: Kind, value: Any, number: int = 0) -> bytes:
    """One frame with a JSON body. Raises TypeError or ValueError for a value that has no JSON, and WireError."""
    return pack(kind, json.dumps(value, separators=(",", ":")).encode(), number)


class Link(asyncio.Protocol):
    """One end of the connection.

    `on_frame` gets kind, number and body of each frame. If it raises, or bytes are no frame, the connection ends.
    `on_lost` is called once, when the connection has ended. `on_room` is called when a full send buffer has room again.
    """

    def __init__(
        self,
        on_frame: Callable[[Kind, int, bytes], None],
        on_lost: Callable[[], None],
        on_room: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_frame, self._on_lost, self._on_room = on_frame, on_lost, on_room
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self.full = False
        self.heard = 0
        """Number of arrivals so far; a part of a frame counts too."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop when the connection is there."""
        assert isinstance(transport, asyncio.Transport)
        transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        self._transport = transport

    def send(self, frames: bytes) -> None:
        """Queue frames. No-op once the connection is lost."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frames)

    def close(self) -> None:
        """Close the connection once the queued frames were sent."""
        if self._transport is not None:
            self._transport.close()

    def pause_writing(self) -> None:
        """Called by the loop when more than HIGH_WATER_BYTES are unsent."""
        self.full = True

    def resume_writing(self) -> None:
        """Called by the loop when the peer has caught up."""
        self.full = False
        self._on_room()

    def data_received(self, data: bytes) -> None:
        """Called by the loop. A peer that does not speak this protocol is cut off."""
        self.heard += 1
        self._buffer += data
        try:
            for kind, number, body in self._frames():
                self._on_frame(kind, number, body)
        except Exception as error:
            told = str(error) if isinstance(error, WireError) else type(error).__name__
            log.error("the connection between front end and engine is cut: a frame cannot be read (%s)", told)
            self._buffer.clear()
            if self._transport is not None:
                self._transport.abort()

    def _frames(self) -> Iterable[tuple[Kind, int, bytes]]:
        while len(self._buffer) >= _HEADER.size:
            length, version, kind, number = _HEADER.unpack_from(self._buffer)
            if version != VERSION or length > MAX_BODY_BYTES:
                raise WireError(f"frame of version {version} and {length} bytes; this is version {VERSION}")
            end = _HEADER.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_HEADER.size : end])
            del self._buffer[:end]
            yield Kind(kind), number, body

    def connection_lost(self, error: Exception | None) -> None:
        """Called by the loop when the connection has ended."""
        # Later frames go nowhere, so they must not wait for room that never comes.
        self.full = False
        self._on_lost()
