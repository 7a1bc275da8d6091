"""Turns at a few places, given to callers in rotation: a caller that asks for many turns waits behind its own."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque

from core.errors import SlipstreamError


class FairLine:
    """At most `places` turns at once, each long or short. Event-loop thread only.

    With two places or more, long turns leave one place to short turns. While turns of both kinds wait, they are
    admitted alternately. Within a kind callers rotate, and the turns of one caller keep their order.
    """

    def __init__(self, places: int) -> None:
        self._free = places
        self._long_free = max(1, places - 1)
        self._short, self._long = _Rotation(), _Rotation()
        self._long_next = False

    async def enter(self, caller: str, *, long: bool) -> None:
        """Wait for a turn of `caller`; `leave` with the same `long` ends it. Raises the error that `fail` was given."""
        waiting = self._long if long else self._short
        if not waiting and self._free and (self._long_free or not long):
            self._take(long)
            return
        turn = waiting.join(caller)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                waiting.drop(caller, turn)
            # The turn was given in the moment of the cancellation: kept, its place would be lost.
            elif turn.exception() is None:
                self.leave(long=long)
            raise

    def leave(self, *, long: bool) -> None:
        """End a turn, and give its place to the turn that is due."""
        self._free += 1
        self._long_free += long
        self._admit()

    def fail(self, error: SlipstreamError) -> None:
        """Make every `enter` that waits raise `error`."""
        for waiting in (self._short, self._long):
            while waiting:
                turn = waiting.next()
                if not turn.done():
                    turn.set_exception(error)

    def _take(self, long: bool) -> None:
        self._free -= 1
        self._long_free -= long

    def _admit(self) -> None:
        while self._free:
            long = bool(self._long and self._long_free)
            if long and self._short:
                # Both kinds wait and may have the place: they alternate.
                long, self._long_next = self._long_next, not self._long_next
            elif not long and not self._short:
                return
            turn = (self._long if long else self._short).next()
            # A turn that is done here was cancelled, and its task has not run since: the place goes to the next.
            if not turn.done():
                self._take(long)
                turn.set_result(None)


class _Rotation:
    """Callers that wait, each with its turns in order. The caller that was served last is behind the others."""

    def __init__(self) -> None:
        self._callers: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._callers)

    def join(self, caller: str) -> asyncio.Future[None]:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._callers.setdefault(caller, deque()).append(turn)
        return turn

    def next(self) -> asyncio.Future[None]:
        """Remove and return the turn that is due."""
        caller, turns = next(iter(self._callers.items()))
        turn = turns.popleft()
        if turns:
            self._callers.move_to_end(caller)
        else:
            del self._callers[caller]
        return turn

    def drop(self, caller: str, turn: asyncio.Future[None]) -> None:
        """Remove a turn whose caller has left. No-op if `next` returned it in the same moment."""
        turns = self._callers.get(caller)
        if turns is not None and turn in turns:
            turns.remove(turn)
            if not turns:
                del self._callers[caller]
