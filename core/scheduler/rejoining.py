"""Requests that are retracted with a copy of their keys and values in host memory, and go on without a prefill.

Keys, values, newest token and length of a row are set on the forward stream before the step that decodes it. Sampling
depends on seed and position only (law 13), so the tokens are the same.
"""

from __future__ import annotations

import numpy as np

from core.executor.interface import HostCopies
from core.memory.host_moves import CopyBack, CopyOut, HostCopy
from core.memory.host_tier import HostTier
from core.memory.request_memory import RequestMemory
from core.memory.seat import Seat
from core.types.arrays import Ints
from core.types.request import Req


class Rejoining:
    """Which waiting request has a copy, which rows wait for theirs, and which leases wait for a landing."""

    def __init__(self, tier: HostTier, memory: RequestMemory, copies: HostCopies) -> None:
        self._tier = tier
        self._memory = memory
        self._copies = copies
        self._kept: dict[Req, HostCopy] = {}
        """Of waiting requests."""
        self._leases: dict[int, int] = {}
        """Number of a copy in flight -> the lease on the pages that it reads."""
        self._backs: dict[int, CopyBack] = {}
        """By row: what the next batch must carry."""
        self._given_up: list[int] = []
        """Numbers of copies that the device has not been told to forget."""
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
            self._kept[req] = back.copy
            return True
        copy = self._tier.take(tokens) if tokens else None
        if copy is None:
            self.dropped += 1
            return False
        self._kept[req] = copy
        self._leases[copy.number] = self._memory.lend(req.row, tokens)
        given_up, self._given_up = tuple(self._given_up), []
        self._copies.copy_out(CopyOut(copy, self._slots(req.row, 0, tokens), given_up))
        return True

    def rejoin(self, req: Req, seat: Seat) -> bool:
        """`req` has got a row: whether it goes on from a copy, which the next batch then carries back."""
        copy = self._kept.pop(req, None)
        if copy is None:
            return False
        skip = min(seat.cached_tokens, copy.tokens)
        slots = self._slots(seat.row, skip, copy.tokens)
        self._backs[seat.row] = CopyBack(copy, seat.row, int(req.outputs[-1]), skip, slots)
        self.rejoined += 1
        return True

    def gone(self, req: Req, row: int) -> bool:
        """`req`, which owned `row` or waits where that is 0, needs its copy no more.

        Returns whether `row` still waited for it: then nothing was written there that other requests may find.
        """
        back = self._backs.pop(row, None)
        copy = self._kept.pop(req, None) if back is None else back.copy
        if copy is not None:
            self._tier.free(copy)
            self._given_up.append(copy.number)
        return back is not None

    def forget(self) -> None:
        """No request goes on from a copy that there is now. No row waits for one."""
        assert not self._backs, "every request that was seated is retracted"
        for req in list(self._kept):
            self.gone(req, 0)

    def take_backs(self) -> tuple[CopyBack, ...]:
        """Of rows seated since the last call. The very next batch must carry them, before any later copy out."""
        backs, self._backs = tuple(self._backs.values()), {}
        for back in backs:
            self._tier.free(back.copy)
        return backs

    def land(self) -> bool:
        """End the leases of copies that have landed; whether there were any."""
        landed = self._copies.landed()
        for number in landed:
            self._memory.reclaim(self._leases.pop(number))
        return bool(landed)

    def _slots(self, row: int, start: int, end: int) -> Ints:
        """int64[end - start]: the KV slots of the tokens of `row` at [start, end)."""
        positions, size = np.arange(start, end), self._memory.page_size
        slots: Ints = self._memory.pages_of(row, end)[positions // size] * size + positions % size
        return slots
