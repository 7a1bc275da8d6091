"""A client that announces large messages and sends all of each but the end, as far as the server lets it."""

from __future__ import annotations

import asyncio
import struct

from tests.contract.api.raw_http2 import (
    ACK,
    DATA,
    END_HEADERS,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    PING,
    PREFACE,
    SETTINGS,
    frame,
    headers,
)

RST_STREAM, GOAWAY, WINDOW_UPDATE = 0x3, 0x7, 0x8
FRAME_BYTES = 16_384
DEFAULT_WINDOW = 65_535


class HalfSender:
    """One connection with calls whose messages never end. `ended` are the streams that the server has answered."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, authority: str) -> None:
        self._reader, self._writer, self._authority = reader, writer, authority
        self._window = self._initial = DEFAULT_WINDOW
        self._windows: dict[int, int] = {}
        self._left: dict[int, int] = {}
        self._next_stream = 1
        self.sent = 0
        self.ended: set[int] = set()
        self._moved, self._answered = asyncio.Event(), asyncio.Event()
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._send())]

    @classmethod
    async def connect(cls, port: int, source: str) -> HalfSender:
        """From an address of this machine's own, so that it is a caller of its own."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(source, 0))
        writer.write(PREFACE + frame(SETTINGS, 0, 0, b""))
        await writer.drain()
        return cls(reader, writer, f"127.0.0.1:{port}")

    def begin(self, path: str, announced: int) -> None:
        """Open a call and announce a message of so many bytes, of which the last one is never sent."""
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        fields = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", self._authority)]
        block = headers([*fields, ("content-type", "application/grpc"), ("te", "trailers")])
        self._writer.write(frame(HEADERS, END_HEADERS, stream, block))
        self._writer.write(frame(DATA, 0, stream, struct.pack(">BI", 0, announced)))
        self._window -= 5
        self._windows[stream] = self._initial - 5
        self._left[stream] = announced - 1
        self._moved.set()

    async def until_ended(self, count: int) -> None:
        """Wait until the server has ended so many of the calls."""
        while len(self.ended) < count:
            self._answered.clear()
            await self._answered.wait()

    async def close(self) -> None:
        """Hang up."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._writer.close()

    async def _send(self) -> None:
        while True:
            # Before the look at the windows: one that widens from here on, as during the drain, has another turn.
            self._moved.clear()
            for stream in list(self._left):
                self._send_some(stream)
            await self._writer.drain()
            await self._moved.wait()

    def _send_some(self, stream: int) -> None:
        while (size := min(FRAME_BYTES, self._left[stream], self._window, self._windows[stream])) > 0:
            self._writer.write(frame(DATA, 0, stream, bytes(size)))
            self._left[stream] -= size
            self._windows[stream] -= size
            self._window -= size
            self.sent += size

    async def _listen(self) -> None:
        while True:
            head = await self._reader.readexactly(9)
            payload = await self._reader.readexactly(int.from_bytes(head[:3], "big"))
            kind, flags, stream = head[3], head[4], int.from_bytes(head[5:], "big")
            if kind == SETTINGS and not flags & ACK:
                self._settle(payload)
                self._writer.write(frame(SETTINGS, ACK, 0, b""))
            elif kind == PING and not flags & ACK:
                self._writer.write(frame(PING, ACK, 0, payload))
            elif kind == WINDOW_UPDATE and stream == 0:
                self._window += int.from_bytes(payload, "big")
            elif kind == WINDOW_UPDATE and stream in self._windows:
                self._windows[stream] += int.from_bytes(payload, "big")
            elif kind in (HEADERS, RST_STREAM):
                self.ended.add(stream)
                self._left.pop(stream, None)
                self._answered.set()
            assert kind != GOAWAY, "the server hangs up"
            self._moved.set()

    def _settle(self, payload: bytes) -> None:
        for place in range(0, len(payload), 6):
            name, value = struct.unpack(">HI", payload[place : place + 6])
            if name == INITIAL_WINDOW_SIZE:
                self._windows = {stream: left + value - self._initial for stream, left in self._windows.items()}
                self._initial = value
