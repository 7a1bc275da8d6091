"""Prefixes that the device has given up come back from host memory, and are not computed again.

What a request has computed is copied out when it gives back its row. A newcomer that finds more of its prompt there
than in the prefix cache gets those tokens back with its first chunk, which begins behind them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from core.memory.host_moves import CopyBack
from core.memory.host_prefixes import HeldPrefix, HostPrefixes
from core.memory.request_memory import RequestMemory
from core.memory.seat import Seat
from core.memory.usable_prefix import Usable
from core.scheduler.outgoing import Outgoing
from core.types.arrays import Ints


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    """What a row waits for: `held` is locked until a batch carries `back`."""

    back: CopyBack
    held: HeldPrefix


class PrefixCopies:
    """Which rows wait for a prefix, and what is copied when a row goes."""

    def __init__(self, prefixes: HostPrefixes, memory: RequestMemory, outgoing: Outgoing) -> None:
        self._prefixes = prefixes
        self._memory = memory
        self._outgoing = outgoing
        self._waiting: dict[int, _Waiting] = {}
        """By row: what the next batch must carry."""
        self.fetched = self.kept = 0
        """Tokens that came back so far; tokens that were copied out."""

    @property
    def evicted(self) -> int:
        """Tokens whose copies gave way to others so far."""
        return self._prefixes.evicted

    def peek(self, ids: Ints, limit: int, salt: str) -> int:
        """How many of the first `limit` tokens of `ids`, int64[n], have copies. Changes nothing."""
        return self._prefixes.peek(ids, limit, salt)

    def keep(self, row: int, ids: Ints, salt: str) -> None:
        """`row`, whose pages hold `ids`, int64[n], is about to give them back: copy the chunks that are not held.

        Only what finite logits vouch for: what comes back is trusted as it was.
        """
        pages = self._memory.pages_of(row, len(ids) // self._memory.page_size * self._memory.page_size)
        sound = self._memory.sound.leading(pages) * self._memory.page_size
        start, copies = self._prefixes.extend(ids[:sound], salt)
        if copies:
            self._outgoing.begin(copies, row, start)
            self.kept += len(copies) * self._prefixes.chunk

    def fetch(self, seat: Seat, ids: Ints, salt: str, usable: Usable) -> Seat:
        """`seat` with as many of its first tokens as host memory has, if these are more; the next batch brings them.

        `ids`, int64[n], of which one at least is left to compute. `usable`: see `usable_prefix`.
        """
        held = self._prefixes.find(ids, usable(len(ids) - 1), salt)
        # Whole pages, as from the device's cache: where it began to compute is where the cache may be cut (`doubt`).
        size = self._memory.page_size
        skip, end = seat.cached_tokens, usable(held.tokens) // size * size
        if end <= skip:
            return seat
        first, last = skip // self._prefixes.chunk, -(-end // self._prefixes.chunk)
        slots = self._outgoing.slots(seat.row, skip, end)
        back = CopyBack(held.copies[first:last], skip - first * self._prefixes.chunk, slots)
        self._prefixes.lock(held)
        self._waiting[seat.row] = _Waiting(back, held)
        self._memory.sound.trust(self._memory.pages_of(seat.row, end)[skip // size :])
        self.fetched += end - skip
        return replace(seat, cached_tokens=end)

    def gone(self, row: int) -> bool:
        """The owner of `row` gives it back. Returns whether it waited still: nothing was written there then."""
        waiting = self._waiting.pop(row, None)
        if waiting is not None:
            self._prefixes.unlock(waiting.held)
        return waiting is not None

    def take_backs(self) -> tuple[CopyBack, ...]:
        """For rows seated since the last call. The very next batch must carry them, before any later copy out."""
        waiting, self._waiting = self._waiting, {}
        for each in waiting.values():
            self._prefixes.unlock(each.held)
        return tuple(each.back for each in waiting.values())

    def flush(self, tenant: str | None = None) -> int:
        """Give up every copy that no row waits for, of `tenant` only if given; returns their tokens."""
        return self._prefixes.flush(tenant)
