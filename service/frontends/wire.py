"""Frames between the engine process and a front end: a fixed header, then JSON or, for tokens, columns of integers.

Header: body length uint32, version uint8, kind uint8, little endian. What happens once per request is JSON; a
step is one EVENTS frame with everything that it made for the front end. Reading runs no code, as unpickling can.
"""

from __future__ import annotations

import asyncio
import json
import struct
from array import array
from collections.abc import Callable, Iterable, Iterator
from enum import IntEnum
from typing import Any

from core.types.io import Delta

VERSION = 1
MAX_BODY_BYTES = 256 * 1024 * 1024
HIGH_WATER_BYTES = 1024 * 1024
"""Unsent bytes of one front end above which its tokens wait in the engine, where they are merged and bounded."""

_HEADER = struct.Struct("<IBB")
_LENGTHS = struct.Struct("<II")
_COLUMNS = 5
assert array("I").itemsize == 4


class Kind(IntEnum):
    """What a frame is. READY, STATE, EVENTS, REPLY and CLOSE come from the engine, the others from front ends."""

    READY = 1
    STATE = 2
    EVENTS = 3
    REPLY = 4
    CLOSE = 5
    LISTENING = 16
    SERVING = 17
    CALL = 18
    END = 19
    COUNTS = 20


class WireError(Exception):
    """The peer speaks another version, or not this protocol."""


def pack(kind: Kind, body: bytes) -> bytes:
    """One frame."""
    return _HEADER.pack(len(body), VERSION, kind) + body


def pack_json(kind: Kind, value: Any) -> bytes:
    """One frame with a JSON body."""
    return pack(kind, json.dumps(value, separators=(",", ":")).encode())


class EventBatch:
    """What one step has for one front end. Read in this order: `before`, the deltas, `after`."""

    def __init__(self) -> None:
        self.before: list[Any] = []
        self.after: list[Any] = []
        self._columns: tuple[list[int], ...] = tuple([] for _ in range(_COLUMNS))
        self._ids: list[int] = []
        self._texts: list[bytes] = []

    def __bool__(self) -> bool:
        return bool(self.before or self.after or self._columns[0])

    def add(self, stream: int, delta: Delta) -> None:
        """A delta without log probabilities."""
        text = delta.text.encode("utf-8", "surrogatepass")
        values = (stream, delta.index, delta.position, len(delta.token_ids), len(text))
        for column, value in zip(self._columns, values):
            column.append(value)
        self._ids.extend(delta.token_ids)
        self._texts.append(text)

    def frame(self) -> bytes:
        """The EVENTS frame."""
        head = json.dumps([self.before, self.after], separators=(",", ":")).encode()
        parts = [_LENGTHS.pack(len(head), len(self._columns[0])), head]
        parts += [array("I", column).tobytes() for column in (*self._columns, self._ids)]
        return pack(Kind.EVENTS, b"".join((*parts, *self._texts)))


def read_events(body: bytes) -> tuple[list[Any], Iterator[tuple[int, Delta]], list[Any]]:
    """What an `EventBatch` held: `before`, (stream, delta) pairs, `after`."""
    head_length, count = _LENGTHS.unpack_from(body)
    at = _LENGTHS.size + head_length
    before, after = json.loads(body[_LENGTHS.size : at])
    return before, _read_deltas(body, at, count), after


def _read_deltas(body: bytes, at: int, count: int) -> Iterator[tuple[int, Delta]]:
    columns = array("I")
    columns.frombytes(body[at : at + 4 * count * _COLUMNS])
    streams, indices, positions, id_counts, text_lengths = (
        columns[place * count : (place + 1) * count] for place in range(_COLUMNS)
    )
    at += 4 * count * _COLUMNS
    ids = array("I")
    ids_end = at + 4 * sum(id_counts)
    ids.frombytes(body[at:ids_end])
    at, first = ids_end, 0
    for stream, index, position, id_count, length in zip(streams, indices, positions, id_counts, text_lengths):
        text = body[at : at + length].decode("utf-8", "surrogatepass")
        yield stream, Delta(index, position, tuple(ids[first : first + id_count]), text)
        first += id_count
        at += length


class Link(asyncio.Protocol):
    """One end of the connection. Frames go to `on_frame`; `on_lost` is called once, `on_room` after a full buffer."""

    def __init__(
        self,
        on_frame: Callable[[Kind, bytes], None],
        on_lost: Callable[[], None],
        on_room: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_frame, self._on_lost, self._on_room = on_frame, on_lost, on_room
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self.full = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop."""
        assert isinstance(transport, asyncio.Transport)
        transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        self._transport = transport

    def send(self, frames: bytes) -> None:
        """Queue frames; nothing happens once the connection is lost."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frames)

    def close(self) -> None:
        """Close after what is queued was sent."""
        if self._transport is not None:
            self._transport.close()

    def pause_writing(self) -> None:
        """Called by the loop: the peer does not keep up."""
        self.full = True

    def resume_writing(self) -> None:
        """Called by the loop."""
        self.full = False
        self._on_room()

    def data_received(self, data: bytes) -> None:
        """Called by the loop. A peer that does not speak this protocol is cut off."""
        self._buffer += data
        try:
            for kind, body in self._frames():
                self._on_frame(kind, body)
        except (WireError, ValueError, KeyError, struct.error):
            if self._transport is not None:
                self._transport.abort()
            raise

    def _frames(self) -> Iterable[tuple[Kind, bytes]]:
        while len(self._buffer) >= _HEADER.size:
            length, version, kind = _HEADER.unpack_from(self._buffer)
            if version != VERSION or length > MAX_BODY_BYTES:
                raise WireError(f"frame of version {version} and {length} bytes; this is version {VERSION}")
            end = _HEADER.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_HEADER.size : end])
            del self._buffer[:end]
            yield Kind(kind), body

    def connection_lost(self, error: Exception | None) -> None:
        """Called by the loop."""
        # What is written from now on goes nowhere, and so does not have to wait for room.
        self.full = False
        self._on_lost()
