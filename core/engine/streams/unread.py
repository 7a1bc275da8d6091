"""Bytes that streams hold for readers that have not taken them: of one stream, and of all together.

Tokens are not counted one by one. The first FREE_TOKENS of an output are not counted at all. With the first token
beyond its room (`PendingOutput.room`), an output's stream takes bytes for all that the output holds and for MORE_TOKENS
to come. It gives them back when the output is read. So ids and log probabilities beyond the free ones are always
covered; text is counted as it was when bytes were taken last.
"""

from __future__ import annotations

from typing import Final, Protocol

from core.errors import SlowConsumer

FREE_TOKENS: Final = 16
"""Tokens of each output that are not counted: a reader that keeps up costs nothing here."""
MORE_TOKENS: Final = 64
"""Tokens to come for which an output takes bytes at a time."""
TOKEN_BYTES: Final = 48
"""What an id takes in a list: a pointer, with room to grow, and an integer object."""
MOST_OF_ONE: Final = 8 * 2**20
"""Bytes that one stream may hold: 8 MiB."""
MOST: Final = 64 * 2**20
"""Bytes that all streams may hold together: 64 MiB."""


def too_many_tokens(most: int) -> SlowConsumer:
    """The error of a reader that left more than `most` tokens of a stream unread."""
    return SlowConsumer(f"more than {most} tokens were left unread")


def too_many_bytes() -> SlowConsumer:
    """The error of a stream that gave way."""
    return SlowConsumer("too many bytes were left unread")


class UnreadHolder(Protocol):
    """What holds unread bytes."""

    def give_way(self) -> None:
        """End as a slow reader's stream does, and hold nothing any more.

        When this returns, every byte that the holder took has been given back.
        """


class UnreadRoom(Protocol):
    """Where unread bytes are counted."""

    def take(self, holder: UnreadHolder, count: int) -> None:
        """Count `count` bytes more for `holder`. When this returns, this holder or another may have given way."""

    def give_back(self, holder: UnreadHolder, count: int) -> None:
        """Count `count` bytes less for `holder`."""


class UnreadBytes:
    """At most `each` bytes for one holder, and `total` for all. Event-loop thread only.

    A holder past `each` gives way. When all together are past `total`, the one that holds most gives way, so a holder
    that fills the room takes it from itself first.
    """

    def __init__(self, each: int = MOST_OF_ONE, total: int = MOST) -> None:
        self._each, self._total = each, total
        self._held: dict[UnreadHolder, int] = {}
        self.bytes = 0

    def take(self, holder: UnreadHolder, count: int) -> None:
        """Count `count` bytes more for `holder`, and let holders give way until both bounds are kept."""
        held = self._held[holder] = self._held.get(holder, 0) + count
        self.bytes += count
        if held > self._each:
            holder.give_way()
        while self.bytes > self._total:
            max(self._held, key=self._held.__getitem__).give_way()

    def give_back(self, holder: UnreadHolder, count: int) -> None:
        """Count `count` bytes less for `holder`."""
        left = self._held.pop(holder, 0) - count
        assert left >= 0, "nothing is given back twice"
        self.bytes -= count
        if left:
            self._held[holder] = left
