"""Turns at a few places, by caller in rotation: one that asks for many waits behind itself, and not before others."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque

from core.errors import SlipstreamError


class FairLine:
    """At most `places` have a turn at once. Event-loop thread only.

    Of several places, long turns leave one to short turns. Long and short turns that wait are admitted alternately,
    callers of each in rotation, turns of one caller in order.
    """

    def __init__(self, places: int) -> None:
        self._free = places
        self._long_free = max(1, places - 1)
        self._short, self._long = _Rotation(), _Rotation()
        self._long_next = False

    async def enter(self, caller: str, *, long: bool) -> None:
        """Wait for a turn; `leave` ends it. Raises what `fail` says."""
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
            elif turn.exception() is None:
                self.leave(long=long)
            raise

    def leave(self, *, long: bool) -> None:
        """The end of a turn: it is another's."""
        self._free += 1
        self._long_free += long
        self._admit()

    def fail(self, error: SlipstreamError) -> None:
        """Have every `enter` that waits raise `error`."""
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
                # Both may: whose turn it is.
                long, self._long_next = self._long_next, not self._long_next
            elif not long and not self._short:
                return
            turn = (self._long if long else self._short).next()
            # Its task has been cancelled, and has not run since.
            if not turn.done():
                self._take(long)
                turn.set_result(None)


class _Rotation:
    """Callers that wait, each with its turns in order. The one whose turn came last is behind the others."""

    def __init__(self) -> None:
        self._callers: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._callers)

    def join(self, caller: str) -> asyncio.Future[None]:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._callers.setdefault(caller, deque()).append(turn)
        return turn

    def next(self) -> asyncio.Future[None]:
        """The turn that is due, which waits no longer."""
        caller, turns = next(iter(self._callers.items()))
        turn = turns.popleft()
        if turns:
            self._callers.move_to_end(caller)
        else:
            del self._callers[caller]
        return turn

    def drop(self, caller: str, turn: asyncio.Future[None]) -> None:
        """The caller has left. No-op if its turn was due in the same moment."""
        turns = self._callers.get(caller)
        if turns is not None and turn in turns:
            turns.remove(turn)
            if not turns:
                del self._callers[caller]
