"""Answers of one message that the client has not read yet: each bounded in time, those of one caller in bytes.

gRPC takes an answer whole and keeps it until the client has read it. A client that read nothing made the server hold
673 MiB with 120 calls so.
"""

from __future__ import annotations

from typing import Any, Final

import grpc.aio

from core.errors import Overloaded
from service.rpc.write_timeout import WriteBound

Context = grpc.aio.ServicerContext[Any, Any]

MOST_BYTES: Final = 16 * 2**20
"""Bytes of one caller's answers that are being written. The largest answers take a few MiB, and a client that reads
takes one in milliseconds."""
REASON: Final = "UNREAD_ANSWERS"


class UnreadAnswers:
    """The answers of one caller that are being written."""

    def __init__(self) -> None:
        self._bytes = 0

    def refuse_if_full(self) -> None:
        """Raise Overloaded if there is no room for an answer, before the call has cost anything."""
        if self._bytes >= MOST_BYTES:
            raise self._full()

    async def write(self, context: Context, answer: bytes, seconds: float) -> None:
        """Write one answer within `seconds`.

        Raises SlowConsumer if the client does not read it in time, and Overloaded if earlier answers of the caller
        take the room. An answer that is larger than the whole room is written when it is alone.
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
