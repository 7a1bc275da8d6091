"""A TCP proxy whose connections break: on request, or each after as many bytes as `patience()` says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

CHUNK = 1024
ENDLESS = 1 << 60


class BreakingProxy:
    """Between clients and `port` on this machine. `accepted` counts connections, `broken` those that were cut."""

    def __init__(self, port: int, patience: Callable[[], int]) -> None:
        self._port, self._patience = port, patience
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.target = ""
        self.accepted = self.broken = 0

    def cut(self) -> None:
        """Break every connection that is there now."""
        self.broken += len(self._writers) // 2
        for writer in self._writers:
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        theirs, ours = await asyncio.open_connection("127.0.0.1", self._port)
        both = {writer, ours}
        self._writers |= both
        try:
            pipes = [asyncio.create_task(_pipe(reader, ours, ENDLESS))]
            pipes.append(asyncio.create_task(_pipe(theirs, writer, self._patience())))
            done, pending = await asyncio.wait(pipes, return_when=asyncio.FIRST_COMPLETED)
            self.broken += any(task.result() for task in done)
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
        finally:
            self._writers -= both
            for each in both:
                each.transport.abort()


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, left: int) -> bool:
    """Pass bytes on; whether it ended because as many had passed as were allowed."""
    try:
        while data := await reader.read(min(CHUNK, left)):
            writer.write(data)
            await writer.drain()
            left -= len(data)
            if not left:
                return True
    except OSError:
        pass
    return False


@asynccontextmanager
async def breaking_proxy(port: int, patience: Callable[[], int] = lambda: ENDLESS) -> AsyncIterator[BreakingProxy]:
    """A running proxy."""
    proxy = BreakingProxy(port, patience)
    server = await asyncio.start_server(proxy._accept, "127.0.0.1", 0)
    proxy.target = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield proxy
    finally:
        server.close()
        proxy.cut()
        await asyncio.sleep(0)
