"""Prefixes that the device has given up come back from host memory, and are not computed again.

What a request has computed is copied out when it gives back its row. A newcomer that finds more of its prompt there
than in the prefix cache gets those tokens back with its first chunk, which begins behind them. Rows that hold more than
keys leave that too, for places where they have it: the last such place, the last one in their prompt, and where it
leaves what is held, or ends of chunks within it (`Trails`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from core.memory.companion import Portable, resumed_by
from core.memory.host_moves import CopyBack, HostCopy
from core.memory.host_prefixes import HeldPrefix, HostPrefixes
from core.memory.request_memory import RequestMemory
from core.memory.seat import Seat
from core.memory.usable_prefix import Usable, usable_prefix
from core.scheduler.disk_prefixes import DiskPrefixes
from core.scheduler.outgoing import Outgoing
from core.scheduler.trails import Trails
from core.types.arrays import Ints


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    """What a row waits for: `held` is locked until a batch carries `backs`."""

    backs: tuple[CopyBack, ...]
    held: HeldPrefix


class PrefixCopies:
    """Which rows wait for a prefix, and what is copied when a row goes."""

    def __init__(
        self,
        prefixes: HostPrefixes,
        memory: RequestMemory,
        outgoing: Outgoing,
        others: Sequence[Portable] = (),
        trails: Trails | None = None,
    ) -> None:
        """`others`: pools that rows hold something of beside their keys, in the arena's order.

        `trails`: None where these are not such that prompts can be gone on from within.
        """
        self._prefixes = prefixes
        self._others = others
        self._memory = memory
        self._outgoing = outgoing
        self._waiting: dict[int, _Waiting] = {}
        """By row: what the next batch must carry."""
        self.trails = trails
        self.disk: DiskPrefixes | None = None
        """What goes on to files, if anything does."""
        self.fetched = self.kept = 0
        """Tokens that came back so far; tokens that were copied out."""

    @property
    def evicted(self) -> int:
        """Tokens whose copies gave way to others so far."""
        return self._prefixes.evicted

    def peek(self, ids: Ints, limit: int, salt: str) -> int:
        """How many of the first `limit` tokens of `ids`, int64[n], have copies, in whole chunks. Changes nothing.

        Where rows hold more than keys this is an estimate: an ending may be behind all chunks, or behind none.
        """
        return self._prefixes.peek(ids, limit, salt)

    def known(self, ids: Ints, salt: str) -> int:
        """Tokens of a newcomer with `ids`, int64[n], behind which its row should leave what it holds, for others.

        Those that host memory has, or files have, where rows hold what is of one place: nothing goes on from there
        before a row has left it.
        """
        if not self._others or self.trails is not None:
            return 0
        held = self.peek(ids, len(ids) - 1, salt)
        return held if self.disk is None else max(held, self.disk.reach(ids[:-1], salt))

    def keep(self, row: int, ids: Ints, salt: str, prompt_len: int) -> None:
        """`row`, whose pages hold `ids`, int64[n], may give them back: copy the chunks that are not held.

        Only what finite logits vouch for: what comes back is trusted as it was. The first `prompt_len` tokens are those
        of its prompt.
        """
        size = self._memory.page_size
        pages = self._memory.pages_of(row, len(ids) // size * size)
        pages = pages[: self._memory.sound.leading(pages)]
        if not self._others:
            self._copy_chunks(row, ids[: len(pages) * size], salt)
            return
        if self.trails is not None and (reached := min(self.trails.reached(row), len(pages) * size)):
            self._copy_chunks(row, ids[:reached], salt)
            self.trails.publish(row, reached, partial(self._write_trail, salt))
        # Where it leaves what other prompts have left, so will further ones.
        places = len(pages), prompt_len // size, self.known(ids[:prompt_len], salt) // size
        ends = {len(found): beside for found, beside in (self._resumed(pages[:count]) for count in places)}
        for count in sorted(ends.keys() - {0}):
            self._copy_chunks(row, ids[: count * size], salt)
            beside = ends[count]
            if made := self._prefixes.end(ids[: count * size], salt, tuple(map(len, beside))):
                start, copy = made
                then = None if self.disk is None else self.disk.keep_ending(ids[: count * size], salt, copy)
                self._outgoing.begin((copy,), row, start, then, beside)
                self.kept += copy.tokens

    def _copy_chunks(self, row: int, ids: Ints, salt: str) -> None:
        start, copies = self._prefixes.extend(ids, salt)
        if copies:
            then = None if self.disk is None else self.disk.keep(ids, salt, start, copies)
            self._outgoing.begin(copies, row, start, then)
            self.kept += len(copies) * self._prefixes.chunk

    def _write_trail(self, salt: str, ids: Ints, copy: HostCopy) -> None:
        if self.disk is not None and (then := self.disk.keep_trail(ids, salt, copy)) is not None:
            self._outgoing.after(copy, then)

    def _resumed(self, pages: Ints) -> tuple[Ints, tuple[Ints, ...]]:
        """As many of `pages`, int64[k], as all other pools can go on behind, and which of their slots go along."""
        pages = resumed_by(self._others, pages)
        beside = [pool.leaves(pages) for pool in self._others] if len(pages) else []
        found = tuple(slots for slots in beside if slots is not None)
        return (pages, found) if len(found) == len(self._others) else (pages[:0], ())

    def at_most(self, ids: Ints, salt: str, usable: Usable, limit: int | None) -> int | None:
        """How many tokens of a newcomer with `ids`, int64[n], may come from the prefix cache; None: any.

        0 where host memory has more of them: a row that gets more than keys begins with no cached page. A `limit` that
        was given stands, since room was made by it.
        """
        if not self._others or limit is not None:
            return limit
        held = self._find(ids, usable, salt)
        if held is None:
            return None
        match, _ = usable_prefix(self._memory.cache, self._memory.companions, ids, len(ids) - 1, salt, usable)
        return 0 if len(match.pages) * self._memory.page_size < held.tokens else None

    def fetch(self, seat: Seat, ids: Ints, salt: str, usable: Usable) -> Seat:
        """`seat` with as many of its first tokens as host memory has, if these are more; the next batch brings them.

        `ids`, int64[n], of which one at least is left to compute. `usable`: see `usable_prefix`.
        """
        if self._others:
            seat = self._fetch_all(seat, ids, salt, usable)
            if self.trails is not None:
                self.trails.seated(seat.row, ids, salt, seat.cached_tokens)
            return seat
        held = self._prefixes.find(ids, usable(len(ids) - 1), salt)
        # Whole pages, as from the device's cache: where it began to compute is where the cache may be cut (`doubt`).
        size = self._memory.page_size
        skip, end = seat.cached_tokens, usable(held.tokens) // size * size
        if end <= skip:
            return seat
        first, last = skip // self._prefixes.chunk, -(-end // self._prefixes.chunk)
        slots = self._outgoing.slots(seat.row, skip, end)
        back = CopyBack(held.copies[first:last], skip - first * self._prefixes.chunk, slots)
        return self._seated(seat, end, (back,), held)

    def _find(self, ids: Ints, usable: Usable, salt: str) -> HeldPrefix | None:
        """What host memory has most tokens of, together with all that rows hold beside their keys."""
        ending = self._prefixes.find_ending(ids, usable, salt)
        trail = None if self.trails is None else self.trails.find(ids, usable, salt)
        return max((held for held in (ending, trail) if held is not None), key=lambda held: held.tokens, default=None)

    def _fetch_all(self, seat: Seat, ids: Ints, salt: str, usable: Usable) -> Seat:
        held = None if seat.cached_tokens else self._find(ids, usable, salt)
        if held is None:
            return seat
        slots = self._outgoing.slots(seat.row, 0, held.tokens)
        pages = self._memory.pages_of(seat.row, held.tokens)
        beside = tuple(pool.resumes(seat.row, pages) for pool in self._others)
        begin = held.tokens - (0 if held.ending is None else held.ending.copy.tokens)
        backs = [CopyBack(held.copies, 0, slots[:begin])] if begin else []
        if held.ending is not None:
            backs.append(CopyBack((held.ending.copy,), 0, slots[begin:], beside=beside))
        elif self.trails is not None:
            backs += self.trails.backs(held, beside[0])
        return self._seated(seat, held.tokens, tuple(backs), held)

    def _seated(self, seat: Seat, end: int, backs: tuple[CopyBack, ...], held: HeldPrefix) -> Seat:
        self._prefixes.lock(held)
        self._waiting[seat.row] = _Waiting(backs, held)
        pages = self._memory.pages_of(seat.row, end)
        self._memory.sound.trust(pages[seat.cached_tokens // self._memory.page_size :])
        self.fetched += end - seat.cached_tokens
        return replace(seat, cached_tokens=end)

    def gone(self, row: int) -> bool:
        """The owner of `row` gives it back. Returns whether it waited still: nothing was written there then."""
        if self.trails is not None:
            self.trails.gone(row)
        waiting = self._waiting.pop(row, None)
        if waiting is not None:
            self._prefixes.unlock(waiting.held)
        return waiting is not None

    def take_backs(self) -> tuple[CopyBack, ...]:
        """For rows seated since the last call. The very next batch must carry them, before any later copy out."""
        waiting, self._waiting = self._waiting, {}
        for each in waiting.values():
            self._prefixes.unlock(each.held)
        return tuple(back for each in waiting.values() for back in each.backs)

    def flush(self, tenant: str | None = None) -> int:
        """Give up every copy that no row waits for, of `tenant` only if given; returns their tokens. Files too."""
        if self.disk is not None:
            self.disk.flush(tenant)
        return self._prefixes.flush(tenant)

    def forget(self) -> None:
        """What was written to files is of another model."""
        if self.disk is not None:
            self.disk.forget()
