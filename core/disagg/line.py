"""A connection on which one engine has asked another one for keys: what is said there, and bytes that go over it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable

from core.disagg import frames
from core.disagg.frames import BadFrame, Message
from core.disagg.interface import TransferFailed


class Line:
    """Each message, and each `frames.SLICE` bytes, go and come within `timeout` seconds, or TimeoutError is raised.

    All methods raise OSError and EOFError where the connection ends, and BadFrame for what is no message.
    """

    def __init__(self, sock: socket.socket, secret: bytes, drawn: str, timeout: float) -> None:
        """`drawn`: the nonce of the engine that asks, over which the other one proves that it has `secret`."""
        self.sock, self.timeout = sock, timeout
        self._secret, self._drawn = secret, drawn

    async def say(self, said: Message) -> None:
        """Say it as the engine that gives, with a proof."""
        async with asyncio.timeout(self.timeout):
            await frames.send(self.sock, {"said": said, "proof": self._proof(said)})

    async def said(self) -> Message:
        """What the engine that gives says next: it has a `status`. Raises TransferFailed without the proof."""
        async with asyncio.timeout(self.timeout):
            message = await frames.receive(self.sock)
        said = message.get("said")
        if not isinstance(said, dict) or not isinstance(said.get("status"), str):
            raise BadFrame("nothing said")
        proved = frames.proves(message.get("proof"), self._secret, "give", self._drawn, said)
        # That the secret is another one is said by an engine that cannot prove it either.
        if said["status"] == "unauthenticated" or not proved:
            raise TransferFailed("unauthenticated", "the two engines have different transfer secrets")
        return said

    async def tell(self, status: str) -> None:
        """Say it as the engine that asks, which has proved itself."""
        async with asyncio.timeout(self.timeout):
            await frames.send(self.sock, {"status": status})

    async def told(self) -> str:
        """What the engine that asks says next."""
        async with asyncio.timeout(self.timeout):
            status = (await frames.receive(self.sock)).get("status")
        if not isinstance(status, str):
            raise BadFrame("no status")
        return status

    async def send(self, parts: Iterable[memoryview]) -> None:
        """Send the bytes of `parts`, one behind the other."""
        loop = asyncio.get_running_loop()
        for piece in frames.slices(parts):
            async with asyncio.timeout(self.timeout):
                await loop.sock_sendall(self.sock, piece)

    async def fill(self, parts: Iterable[memoryview]) -> None:
        """Fill `parts` with bytes that were sent."""
        for piece in frames.slices(parts):
            async with asyncio.timeout(self.timeout):
                await frames.fill(self.sock, piece)

    def _proof(self, said: Message) -> str:
        return frames.proof(self._secret, "give", self._drawn, said)
