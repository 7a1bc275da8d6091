"""Answers of one message on their way: within a time each, and within so many bytes of one caller.

gRPC takes an answer whole and keeps it until the client has read it. A client that reads nothing made the server hold
673 MiB with 120 calls so.
"""

from __future__ import annotations

from typing import Any, Final

import grpc.aio

from core.errors import Overloaded
from service.rpc.write_timeout import WriteBound

Context = grpc.aio.ServicerContext[Any, Any]

MOST_BYTES: Final = 16 * 2**20
"""Of one caller's answers that are being written. The largest answers there are take a few MiB, and a client that reads
takes one in milliseconds."""
REASON: Final = "UNREAD_ANSWERS"


class UnreadAnswers:
    """Those of one caller."""

    def __init__(self) -> None:
        self._bytes = 0

    def refuse_if_full(self) -> None:
        """Raises Overloaded for a call whose answer would find no room, before it costs anything."""
        if self._bytes >= MOST_BYTES:
            raise self._full()

    async def write(self, context: Context, answer: bytes, seconds: float) -> None:
        """Write one answer within `seconds`. Raises SlowConsumer, and Overloaded where others take the room.

        An answer that is larger than the room passes when it is alone.
        """
        if self._bytes and self._bytes + len(answer) > MOST_BYTES:
            raise self._full()
        self._bytes += len(answer)
        try:
            async with WriteBound(seconds) as bound:
                bound.begin()
                await context.write(answer)
                bound.end()
        finally:
            self._bytes -= len(answer)

    @staticmethod
    def _full() -> Overloaded:
        return Overloaded("this client has not read the answers of its earlier calls", reason=REASON)
