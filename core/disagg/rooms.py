"""Rooms of an engine that prefills: what is offered in each, or will be. Belongs to one event loop."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable

from core.disagg.interface import Offer

REMEMBERED = 1 << 14
"""Rooms that are over and are told apart from those that may still come."""


class Room:
    """Where keys are expected, then offered to one peer after the other until one has them all."""

    def __init__(self) -> None:
        self.expected = 0
        """Requests that may still offer something there: gateways draw names, and may draw one twice."""
        self.offer: Offer | None = None
        self.over: Callable[[bool], None] | None = None
        self.changed = asyncio.Event()
        self.sending: asyncio.Task[None] | None = None
        self.expiry: asyncio.TimerHandle | None = None


class Rooms:
    """Tells for each room that has a name once how it ended, and lets none wait without end."""

    def __init__(self, timeout: float) -> None:
        """`timeout`: seconds for which an offer stands while nothing of it is sent."""
        self._timeout = timeout
        self._rooms: dict[str, Room] = {}
        self._gone: OrderedDict[str, None] = OrderedDict()
        self.arrived = asyncio.Event()
        """Set, and replaced, when a room is expected."""

    def __len__(self) -> int:
        return len(self._rooms)

    def find(self, name: str) -> Room | None:
        """The room, if there is one now."""
        return self._rooms.get(name)

    def is_gone(self, name: str) -> bool:
        """Whether it was there, and is no more."""
        return name in self._gone

    def expect(self, name: str) -> None:
        """Keys will be offered there. A name that is used again is a new room."""
        self._gone.pop(name, None)
        self._rooms.setdefault(name, Room()).expected += 1
        self.arrived.set()
        self.arrived = asyncio.Event()

    def offer(self, offer: Offer, over: Callable[[bool], None]) -> None:
        """Keys are there. A room that was withdrawn meanwhile has no peer that waits: the offer is over."""
        room = self._rooms.get(offer.room)
        if room is None or room.offer is not None:
            over(False)
            return
        room.offer, room.over = offer, over
        self._stand(offer.room, room)
        room.changed.set()

    def withdraw(self, name: str) -> None:
        """Nothing is offered there any more: peers that wait are told, one that is being sent to is cut off."""
        room = self._rooms.get(name)
        if room is None:
            return
        room.expected -= 1
        if room.expected > 0:
            return
        if room.sending is not None:
            # It ends the room itself, once nothing reads what was offered.
            del self._rooms[name]
            room.sending.cancel()
            room.changed.set()
            return
        self.end(name, room, delivered=False)

    def retire(self) -> None:
        """Every offer that stands is over, and what is being sent is cut off: other weights serve from now on."""
        for name, room in list(self._rooms.items()):
            if room.offer is not None:
                room.expected = 1
                self.withdraw(name)

    def begin(self, name: str, room: Room) -> None:
        """The current task sends what is offered there; the room does not expire meanwhile."""
        room.sending = asyncio.current_task()
        if room.expiry is not None:
            room.expiry.cancel()
            room.expiry = None

    def sent(self, name: str, room: Room, *, delivered: bool) -> None:
        """The task of `begin` is over: the peer has all of it, or the next one may ask."""
        room.sending = None
        if delivered or self._rooms.get(name) is not room:
            self.end(name, room, delivered=delivered)
        else:
            self._stand(name, room)
            room.changed.set()

    def end(self, name: str, room: Room, *, delivered: bool) -> None:
        """The room is no more."""
        if self._rooms.get(name) is room:
            del self._rooms[name]
        # A name that was used again since is that of another room.
        if name not in self._rooms:
            self._gone[name] = None
        while len(self._gone) > REMEMBERED:
            self._gone.popitem(last=False)
        if room.expiry is not None:
            room.expiry.cancel()
        over, room.over = room.over, None
        room.changed.set()
        if over is not None:
            over(delivered)

    def close(self) -> None:
        """End every room: nothing is sent any more."""
        for name, room in list(self._rooms.items()):
            self.end(name, room, delivered=False)

    def _stand(self, name: str, room: Room) -> None:
        loop = asyncio.get_running_loop()
        room.expiry = loop.call_later(self._timeout, lambda: self.end(name, room, delivered=False))
