"""Bytes that streams hold for readers that have not taken them: of one stream, and of all together.

No token is counted by itself. The first FREE_TOKENS of an output are not counted at all. With the first token beyond
them (`PendingOutput.room`) its stream takes bytes for all that the output holds and for MORE_TOKENS to come, and gives
them back when the output is read. So ids and log probabilities beyond the free ones are always covered; text is counted
as it was when bytes were taken last.
"""

from __future__ import annotations

from typing import Final, Protocol

FREE_TOKENS: Final = 16
"""Of each output, not counted: a reader that keeps up costs nothing here."""
MORE_TOKENS: Final = 64
"""For how many more an output asks."""
TOKEN_BYTES: Final = 48
"""What an id takes in a list: a pointer, with room to grow, and an integer of Python's own."""
MOST_OF_ONE: Final = 8 * 2**20
MOST: Final = 64 * 2**20


class UnreadHolder(Protocol):
    """What holds unread bytes."""

    def give_way(self) -> None:
        """End as one of a slow reader, and hold nothing any more: all that was taken is given back when it returns."""


class UnreadRoom(Protocol):
    """Where unread bytes are counted."""

    def take(self, holder: UnreadHolder, count: int) -> None:
        """`holder` holds `count` bytes more. It, or another, may have given way when this returns."""

    def give_back(self, holder: UnreadHolder, count: int) -> None:
        """`holder` holds `count` bytes less."""


class UnreadBytes:
    """At most `each` bytes of one holder and `total` of all. Past the first it gives way, past the second the largest.

    So one that fills the room takes it from itself first. Event-loop thread only.
    """

    def __init__(self, each: int = MOST_OF_ONE, total: int = MOST) -> None:
        self._each, self._total = each, total
        self._held: dict[UnreadHolder, int] = {}
        self.bytes = 0

    def take(self, holder: UnreadHolder, count: int) -> None:
        """See `UnreadRoom`."""
        held = self._held[holder] = self._held.get(holder, 0) + count
        self.bytes += count
        if held > self._each:
            holder.give_way()
        while self.bytes > self._total:
            max(self._held, key=self._held.__getitem__).give_way()

    def give_back(self, holder: UnreadHolder, count: int) -> None:
        """See `UnreadRoom`."""
        left = self._held.pop(holder, 0) - count
        assert left >= 0, "nothing is given back twice"
        self.bytes -= count
        if left:
            self._held[holder] = left
