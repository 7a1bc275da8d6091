"""Requests that are retracted with a copy of their keys and values in host memory, and go on without a prefill.

Keys, values, newest token and length of a row are set on the forward stream before the step that decodes it. Sampling
depends on seed and position only (law 13), so the tokens are the same.
"""

from __future__ import annotations

from core.memory.host_moves import HostCopy, Rejoined
from core.memory.host_tier import HostTier
from core.memory.seat import Seat
from core.scheduler.outgoing import Outgoing
from core.types.request import Req


class Rejoining:
    """Which waiting request has a copy, and which rows wait for theirs."""

    def __init__(self, tier: HostTier, outgoing: Outgoing) -> None:
        self._tier = tier
        self._outgoing = outgoing
        self._kept: dict[Req, HostCopy] = {}
        """Of waiting requests."""
        self._backs: dict[int, Rejoined] = {}
        """By row: what the next batch must carry."""
        self.rejoined = self.dropped = 0
        """Requests that went on from a copy; requests that could have, had there been room for one."""

    def __contains__(self, req: Req) -> bool:
        """Whether `req`, which waits, has a copy."""
        return req in self._kept

    @property
    def used_bytes(self) -> int:
        """Bytes of host memory that hold copies."""
        return self._tier.used_bytes

    def leave(self, req: Req, tokens: int) -> bool:
        """`req`, which owns its row, is retracted behind `tokens` tokens: begin a copy of them; False without room."""
        if (back := self._backs.pop(req.row, None)) is not None:
            # Its row was never filled, and no batch knows of it.
            (self._kept[req],) = back.copies
            return True
        copy = self._tier.take(tokens) if tokens else None
        if copy is None:
            self.dropped += 1
            return False
        self._kept[req] = copy
        self._outgoing.begin((copy,), req.row, 0)
        return True

    def rejoin(self, req: Req, seat: Seat) -> bool:
        """`req` has got a row: whether it goes on from a copy, which the next batch then carries back."""
        copy = self._kept.pop(req, None)
        if copy is None:
            return False
        skip = min(seat.cached_tokens, copy.tokens)
        slots = self._outgoing.slots(seat.row, skip, copy.tokens)
        self._backs[seat.row] = Rejoined((copy,), skip, slots, seat.row, int(req.outputs[-1]))
        self.rejoined += 1
        return True

    def gone(self, req: Req, row: int) -> bool:
        """`req`, which owned `row` or waits where that is 0, needs its copy no more.

        Returns whether `row` still waited for it: then nothing was written there that other requests may find.
        """
        back = self._backs.pop(row, None)
        copy = self._kept.pop(req, None) if back is None else back.copies[0]
        if copy is not None:
            self._tier.free(copy)
        return back is not None

    def forget(self) -> None:
        """No request goes on from a copy that there is now. No row waits for one."""
        assert not self._backs, "every request that was seated is retracted"
        for req in list(self._kept):
            self.gone(req, 0)

    def take_backs(self) -> tuple[Rejoined, ...]:
        """Of rows seated since the last call. The very next batch must carry them, before any later copy out."""
        backs, self._backs = tuple(self._backs.values()), {}
        for back in backs:
            self._tier.free(back.copies[0])
        return backs
