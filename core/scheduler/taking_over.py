"""Keys of waiting requests in host memory, which come from there as prefixes do: of prompts that another engine has
computed, and of requests that were retracted, where rows hold more than keys.

The row is that of any request whose prompt was cached: its first chunk brings the keys, computes the rest of the
prompt, and samples. So the first token is this engine's too, whatever the other one was told of sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from core.memory.companion import resumed_by
from core.memory.host_moves import CopyBack, HostCopy
from core.memory.host_tier import HostTier
from core.memory.request_memory import RequestMemory
from core.memory.seat import Seat
from core.memory.usable_prefix import usable_prefix
from core.scheduler.handing_over import portable
from core.scheduler.outgoing import Outgoing
from core.types.arrays import Ints
from core.types.request import Req


@dataclass(frozen=True, slots=True, eq=False)
class Arrived:
    """Keys of the tokens of a prompt from `start` on, in `copy`. `cached_tokens`: those that no engine computed."""

    copy: HostCopy
    start: int
    cached_tokens: int
    own: bool = False
    """It was computed here, before the request was retracted."""


class TakingOver:
    """Which waiting request has keys in host memory, and which rows wait for theirs."""

    def __init__(self, tier: HostTier, outgoing: Outgoing, memory: RequestMemory, *, leaves: bool = False) -> None:
        """`leaves`: whether retracted requests of an engine whose rows hold more than keys leave copies."""
        self._tier = tier
        self._outgoing = outgoing
        self._memory = memory
        self._others = portable(memory, tier)
        self._leaves = leaves and bool(self._others)
        self._arrived: dict[Req, Arrived] = {}
        """Of waiting requests."""
        self._backs: dict[int, CopyBack] = {}
        """By row: what the next batch must carry."""
        self.era = 0
        """How often all that was here became worthless: keys of an era before are not adopted."""
        self.rejoined = self.dropped = 0
        """Retracted requests that went on from what they left; those that could leave nothing."""
        self.taken = self.taken_tokens = self.evicted = 0
        """Requests that went on from what arrived; tokens; requests whose cached beginning was gone when they did."""

    def __contains__(self, req: Req) -> bool:
        """Whether `req`, which waits, has keys here."""
        return req in self._arrived

    def reserve(self, tokens: int, ready: Callable[[], None]) -> HostCopy | None:
        """Room for keys of `tokens` tokens, which may be written once `ready` was called; None without room."""
        pages = tokens // self._memory.page_size
        copy = self._tier.take(tokens, tuple(pool.slots_for(pages) for pool in self._others))
        if copy is not None:
            self._outgoing.vacate((copy,), ready)
        return copy

    def views(self, copy: HostCopy) -> Sequence[memoryview]:
        """Where the bytes of `copy` are written."""
        return self._outgoing.views(copy)

    def give_up(self, copy: HostCopy) -> None:
        """What `reserve` returned is not needed, and nothing writes there any more."""
        self._tier.free(copy)

    def missing(self, ids: Ints, tokens: int, salt: str) -> int:
        """From where on keys of the first `tokens` of `ids`, int64[n], are wanted: behind what is here already.

        A state or a window that comes along is of the end of a prompt: a row that gets one begins with no cached page.
        """
        match, _ = usable_prefix(self._memory.cache, self._memory.companions, ids, tokens, salt, int)
        cached = len(match.pages) * self._memory.page_size
        return cached if cached == tokens or not self._others else 0

    def at_most(self, limit: int | None) -> int | None:
        """How many tokens of a request with keys here may come from the prefix cache, of at most `limit`; None: any."""
        return 0 if self._others else limit

    def adopt(self, req: Req, arrived: Arrived) -> None:
        """`req`, which is going to be queued, goes on from `arrived`."""
        self._arrived[req] = arrived

    def leave(self, req: Req, tokens: int) -> bool:
        """`req`, which owns its row, is retracted behind `tokens` tokens: begin a copy; False where it cannot be.

        It goes on from the last end of a page of which all pools have what goes along: a state that has gone past that
        cannot be taken back (see `Rejoining` for rows that hold keys alone).
        """
        if not (self._leaves and tokens):
            return False
        size, row = self._memory.page_size, req.row
        pages = resumed_by(self._others, self._memory.pages_of(row, tokens // size * size))
        beside = [slots for pool in self._others if len(pages) and (slots := pool.leaves(pages)) is not None]
        end = len(pages) * size
        whole = end and len(beside) == len(self._others) and req.usable(end) == end
        copy = self._tier.take(end, tuple(map(len, beside))) if whole else None
        if copy is None:
            self.dropped += 1
            return False
        self._outgoing.begin((copy,), row, 0, beside=tuple(beside))
        self._arrived[req] = Arrived(copy, 0, 0, own=True)
        return True

    def fetch(self, req: Req, seat: Seat) -> Seat:
        """`seat` of `req` with the tokens that arrived, if these are more than it has; the next batch brings them."""
        arrived = self._arrived.pop(req)
        # Whole pages, as from the device's cache: where it began to compute is where the cache may be cut (`doubt`).
        size = self._memory.page_size
        first, end = arrived.start, (arrived.start + arrived.copy.tokens) // size * size
        if seat.cached_tokens < first:
            self.evicted += 1
        if not first <= seat.cached_tokens < end:
            self._tier.free(arrived.copy)
            return seat
        slots = self._outgoing.slots(seat.row, seat.cached_tokens, end)
        pages = self._memory.pages_of(seat.row, end)
        beside = tuple(pool.resumes(seat.row, pages) for pool in self._others)
        self._backs[seat.row] = CopyBack((arrived.copy,), seat.cached_tokens - first, slots, beside=beside)
        # The other engine has sampled from them, of finite logits.
        self._memory.sound.trust(pages[seat.cached_tokens // size :])
        self.rejoined += arrived.own
        self.taken += not arrived.own
        self.taken_tokens += (end - seat.cached_tokens) * (not arrived.own)
        return replace(seat, cached_tokens=end)

    def cached_tokens(self, req: Req) -> int:
        """Tokens of its prompt that no engine has computed for `req`, which waits and has keys here."""
        return self._arrived[req].cached_tokens

    def gone(self, req: Req, row: int) -> bool:
        """`req`, which owned `row` or waits where that is 0, needs no keys from here any more.

        Returns whether `row` still waited for them: then nothing was written there that other requests may find.
        """
        arrived, back = self._arrived.pop(req, None), self._backs.pop(row, None)
        if arrived is not None:
            self._tier.free(arrived.copy)
        if back is not None:
            self._tier.free(back.copies[0])
        return back is not None

    def forget(self) -> None:
        """No request goes on from keys that are here now. No row waits for any."""
        assert not self._backs, "every request that was seated is retracted"
        self.era += 1
        for req in list(self._arrived):
            self.gone(req, 0)

    def take_backs(self) -> tuple[CopyBack, ...]:
        """For rows seated since the last call. The very next batch must carry them, before any later copy out."""
        backs, self._backs = tuple(self._backs.values()), {}
        for back in backs:
            self._tier.free(back.copies[0])
        return backs
