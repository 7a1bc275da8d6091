"""How bytes go between two engines that have agreed on them: what each way offers, and the way over a connection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from core.disagg.frames import BadFrame, Message
from core.disagg.line import Line


class Sender(Protocol):
    """The side of the engine that gives. Methods belong to its transfer thread, but for `close`."""

    async def send(self, line: Line, ready: Message, parts: Sequence[memoryview]) -> None:
        """Say `ready`, and let the bytes of `parts` go; returns once the other engine has said that it has them.

        Raises what `Line` raises. When it returns, raises or is cancelled, nothing that is read there later is taken.
        """
        ...

    def close(self) -> None:
        """End it; its thread has ended. Idempotent."""
        ...


class Receiver(Protocol):
    """The side of the engine that asks. Methods belong to its transfer thread, but for `is_quiet` and `close`."""

    async def receive(self, line: Line, ready: Message, parts: Sequence[memoryview]) -> None:
        """Fill `parts` with the bytes that `ready` tells of, and say that they are there.

        Raises what `Line` raises, and TransferFailed.
        """
        ...

    def is_quiet(self, parts: Sequence[memoryview]) -> bool:
        """Whether a `receive` that has ended for `parts` has left nothing that may still write there. Any thread."""
        ...

    async def quiet(self, parts: Sequence[memoryview]) -> None:
        """Wait until that is so."""
        ...

    def close(self) -> None:
        """End it; its thread has ended. Nothing writes any more. Idempotent."""
        ...


class StreamSender:
    """Sends bytes over the connection itself."""

    async def send(self, line: Line, ready: Message, parts: Sequence[memoryview]) -> None:
        """See `Sender`."""
        await line.say(ready)
        await line.send(parts)
        if await line.told() != "got":
            raise BadFrame("no acknowledgement")

    def close(self) -> None:
        """See `Sender`."""


class StreamReceiver:
    """Receives bytes over the connection itself."""

    async def receive(self, line: Line, ready: Message, parts: Sequence[memoryview]) -> None:
        """See `Receiver`."""
        await line.fill(parts)
        await line.tell("got")

    def is_quiet(self, parts: Sequence[memoryview]) -> bool:
        """See `Receiver`: it writes itself."""
        return True

    async def quiet(self, parts: Sequence[memoryview]) -> None:
        """See `Receiver`."""

    def close(self) -> None:
        """See `Receiver`."""
