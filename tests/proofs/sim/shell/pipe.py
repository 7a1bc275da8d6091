"""Two ends of a connection in memory: bytes arrive late, in pieces of any size, and one day not at all.

An `End` behaves as asyncio's transport over a stream socket: what the kernel does not take is buffered, the protocol is
paused above the high mark and told to go on below the low one, closing first sends what is there, and the end of the
peer is an end here. The kernel's buffers are as small as the seed says, so that being full is ordinary.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass

from tests.proofs.sim.shell.loop import VirtualLoop


@dataclass(frozen=True, slots=True)
class PipeScenario:
    """Bytes that the kernel holds each way, the high mark of an end's own buffer, the largest piece that arrives at
    once, and the longest delay of a piece in seconds."""

    kernel: int
    high: int
    piece: int
    delay: float


class End(asyncio.Transport):
    """One end. `peer` is the other; `wire` is what this end sent and the peer has not read."""

    peer: End

    def __init__(self, loop: VirtualLoop, protocol: asyncio.Protocol, drawn: PipeScenario, rng: random.Random) -> None:
        super().__init__()
        self._loop, self._protocol, self._drawn, self._rng = loop, protocol, drawn, rng
        self.wire = bytearray()
        self.sent = 0
        self.lost = False
        """Whether `connection_lost` was called."""
        self.paused = 0
        """How often writing was paused."""
        self.breaks_at: int | None = None
        """With how many bytes sent `on_break` is called, in the middle of whatever sends them."""
        self.on_break: Callable[[], None] = lambda: None
        self._buffer = bytearray()
        self._high, self._low = drawn.high, drawn.high // 4
        self._full = self._closing = self._eof_sent = self._dropped = self._reading = self._draining = False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Marks are the seed's: a simulated run has not the megabytes that the real ones need."""

    def is_closing(self) -> bool:
        """See `asyncio.BaseTransport`."""
        return self._closing

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """See `asyncio.WriteTransport`."""
        if self._dropped or not data:
            return
        if self.peer.gone:
            # A broken pipe is noticed by the next write.
            self._drop(BrokenPipeError())
            return
        self._buffer += data
        self._send()
        if len(self._buffer) > self._high and not self._full:
            self._full = True
            self.paused += 1
            self._protocol.pause_writing()

    def close(self) -> None:
        """See `asyncio.BaseTransport`: after what is buffered was sent."""
        if self._closing:
            return
        self._closing = True
        if not self._buffer:
            self._drop(None)

    def abort(self) -> None:
        """See `asyncio.WriteTransport`. Done to a peer that sends what is no frame, and none here does."""
        aborted = ConnectionAbortedError("a frame could not be read")
        self._loop.call_exception_handler({"message": "a connection was cut", "exception": aborted})
        self._buffer.clear()
        self._drop(aborted)

    @property
    def unread(self) -> int:
        """Bytes that were written here and not read there."""
        return len(self._buffer) + len(self.wire)

    @property
    def gone(self) -> bool:
        """Whether nothing that is sent here will be read."""
        return self._dropped

    def reset(self) -> None:
        """The connection breaks; what was on its way to the peer may still arrive."""
        self._buffer.clear()
        self._drop(ConnectionResetError())

    def lose(self, keep: int) -> None:
        """Of what is on its way to the peer only `keep` bytes arrive."""
        del self.wire[keep:]

    def _send(self) -> None:
        room = self._drawn.kernel - len(self.wire)
        if room > 0 and self._buffer:
            piece = self._buffer[:room]
            del self._buffer[: len(piece)]
            self.wire += piece
            self.sent += len(piece)
            self.peer._readable()
            if self.breaks_at is not None and self.sent >= self.breaks_at:
                self.breaks_at = self.peer.breaks_at = None
                self._loop.call_soon(self.on_break)

    def _readable(self) -> None:
        if not self._reading:
            self._reading = True
            self._loop.call_later(self._loop.delay(self._drawn.delay), self._read)

    def _read(self) -> None:
        self._reading = False
        if self._dropped or self._closing:
            return
        wire = self.peer.wire
        if wire:
            # Mostly as it says, and now and then a few bytes, so that every header is split one day.
            most = 3 if self._rng.random() < 0.1 else self._drawn.piece
            size = 1 + int(self._rng.random() * most)
            data = bytes(wire[:size])
            del wire[:size]
            self.peer._has_room()
            if wire or self.peer._eof_sent:
                self._readable()
            try:
                self._protocol.data_received(data)
            except Exception as error:
                self._loop.call_exception_handler({"message": "data_received() failed", "exception": error})
                self._drop(error)
        elif self.peer._eof_sent:
            self.close()

    def _has_room(self) -> None:
        """The peer read: the loop says so to this end a little later."""
        if self._buffer and not self._draining and not self._dropped:
            self._draining = True
            self._loop.call_later(self._loop.delay(self._drawn.delay), self._writable)

    def _writable(self) -> None:
        self._draining = False
        if self._dropped:
            return
        if self.peer.gone:
            self._drop(BrokenPipeError())
            return
        self._send()
        if self._full and len(self._buffer) <= self._low:
            self._full = False
            self._protocol.resume_writing()
        if not self._buffer and self._closing:
            self._drop(None)

    def _drop(self, error: Exception | None) -> None:
        """Nothing goes out or comes in any more; the protocol hears of it in the next pass."""
        if self._dropped:
            return
        self._dropped = self._closing = self._eof_sent = True
        self._loop.call_soon(self._say_lost, error)
        self.peer._readable()
        self.peer._has_room()

    def _say_lost(self, error: Exception | None) -> None:
        self.lost = True
        self._protocol.connection_lost(error)


def connect(
    loop: VirtualLoop, one: asyncio.Protocol, other: asyncio.Protocol, drawn: PipeScenario, rng: random.Random
) -> tuple[End, End]:
    """Two ends that know each other; both protocols are told."""
    ends = End(loop, one, drawn, rng), End(loop, other, drawn, rng)
    ends[0].peer, ends[1].peer = ends[1], ends[0]
    for end, protocol in zip(ends, (one, other), strict=True):
        protocol.connection_made(end)
    return ends
