"""Rows, KV pages, cached prefixes and `companions` (other pools) of running requests, taken and given back together.

They meet only here, so that "all or nothing" and "freed once" are properties of one file. Host state only: changes
to the device table leave as `TableWrites` inside the next submitted batch (law 2).
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

import numpy as np

from core.invariants import check
from core.memory.companion import AdmissionFacts, Companion, Drafting, Growing, Writes
from core.memory.kv_allocator import PagedKVAllocator
from core.memory.leases import Leases
from core.memory.pending_writes import PendingWrites
from core.memory.req_to_token_pool import TableWrites
from core.memory.rows import RowAllocator
from core.memory.seat import Doubt, Seat
from core.memory.sound_pages import SoundPages
from core.memory.usable_prefix import Usable, usable_prefix
from core.prefix.base import PrefixCache
from core.prefix.node import PrefixNode
from core.types.arrays import Ints
from core.types.stats import PoolStats

NO_WRITES: Writes = MappingProxyType({})


class RequestMemory:
    """What each running row holds: the KV pages `_pages[row, :_count[row]]`, in the order of its tokens.

    Each is owned by the row (`_owned`) and freed on release, or by the prefix cache, where the row's lock on
    `_nodes[row]` keeps it. Pages are offered to the cache while a prompt is still being computed: a reader admitted
    later runs later in the one FIFO, so it finds them written (law 4). So requests that arrive together share a prefix.
    """

    def __init__(
        self,
        rows: RowAllocator,
        allocator: PagedKVAllocator,
        cache: PrefixCache,
        max_len: int,
        companions: Sequence[Companion] = (),
        reach: int | None = None,
    ) -> None:
        """`reach`: how many of the newest tokens a logit depends on; None for all, as where one layer sees all."""
        self.rows = rows
        self.allocator = allocator
        self.cache = cache
        self.leases = Leases(allocator.num_pages, cache)
        self.companions = tuple(companions)
        self._growing = tuple(c for c in self.companions if isinstance(c, Growing))
        self.draft_room = min((c.draft_room for c in self.companions if isinstance(c, Drafting)), default=None)
        """The most drafts that all rows of a step may verify together; None where companions set no limit."""
        self.page_size = allocator.page_size
        width = allocator.pages_for(max_len)
        shape = (rows.size + 1, width)
        self._pages: Ints = np.zeros(shape, np.int64)
        self._owned = np.zeros(shape, np.bool_)
        self._count: Ints = np.zeros(rows.size + 1, np.int64)
        self._cached: Ints = np.zeros(rows.size + 1, np.int64)
        """By row: tokens whose pages the cache owns and `_nodes` locks; grows with `offer`."""
        self._shared: Ints = np.zeros(rows.size + 1, np.int64)
        """By row: tokens that were cached at admission, so not computed by this owner. Constant until release."""
        self.sound = SoundPages(allocator.num_pages, allocator.page_size, max_len if reach is None else reach)
        self._nodes: list[PrefixNode | None] = [None] * (rows.size + 1)
        self._salts: list[str] = [""] * (rows.size + 1)
        self._writes = PendingWrites(self.page_size)

    @property
    def obtainable_pages(self) -> int:
        """Pages that could be handed out now: free ones, and cached ones that no request locks."""
        return self.allocator.available + self.cache.evictable_pages

    def fits_alone(self, total_tokens: int, encoder_tokens: int = 0) -> bool:
        """Whether empty pools could serve a request of `total_tokens`, prompt and output: the check at entry."""
        if self.allocator.pages_for(total_tokens) > self.allocator.num_pages:
            return False
        return all(c.fits_alone(total_tokens, encoder_tokens) for c in self.companions)

    def would_admit(
        self, ids: Ints, salt: str, reserve_pages: int, leaving: Ints, *, encoder_tokens: int = 0, usable: Usable = int
    ) -> int | None:
        """Whether `admit` would succeed once the owners of rows `leaving`, int64[k], have given them back.

        Returns the cached tokens that this counts on, or None if it would fail. With them as `at_most`, `admit`
        succeeds once the leases of now have ended, if nothing else happens. Changes nothing but recency in the cache.
        """
        match, known = usable_prefix(self.cache, self.companions, ids, len(ids) - 1, salt, usable)
        facts = AdmissionFacts(len(ids), match.pages, known, encoder_tokens)
        needed = self.allocator.pages_for(len(ids)) - len(match.pages)
        # Locked, so that pages of the new request's own prefix are not counted as obtainable.
        self.cache.lock(match.node)
        # What is leased comes without anything more: a request that gives way for it would do so for nothing.
        coming = int(self._owned[leaving].sum()) + self.leases.diverted
        coming += self.cache.held_only_by([*(self._node(row) for row in leaving.tolist()), *self.leases.nodes])
        fits = needed + reserve_pages <= self.obtainable_pages + coming and all(
            c.would_admit(facts, leaving) for c in self.companions
        )
        self._free(self.cache.unlock(match.node))
        return len(match.pages) * self.page_size if fits else None

    def admit(
        self,
        ids: Ints,
        salt: str,
        reserve_pages: int,
        *,
        encoder_tokens: int = 0,
        adapter_slot: int = 0,
        at_most: int | None = None,
        elsewhere: int = 0,
        usable: Usable = int,
    ) -> Seat | None:
        """Take a row and pages for all of `ids`, sharing what the cache has; None (and no change) when it does not fit.

        At least one token is left to compute: the first output is sampled from its logits. `reserve_pages` must stay
        obtainable, for decodes of running requests. `encoder_tokens`: tokens of the encoder's input, `adapter_slot`:
        slot of the LoRA adapter, 0 without. `at_most`: limit of shared tokens. `elsewhere`: as many of its
        first pages host memory has keys of. `usable`: see `usable_prefix`.
        """
        if not self.rows.available:
            return None
        limit = len(ids) - 1 if at_most is None else min(len(ids) - 1, at_most)
        match, known = usable_prefix(self.cache, self.companions, ids, limit, salt, usable)
        facts = AdmissionFacts(len(ids), match.pages, max(known, elsewhere), encoder_tokens, adapter_slot)
        needed = self.allocator.pages_for(len(ids)) - len(match.pages)
        self.cache.lock(match.node)
        fits = needed + reserve_pages <= self.obtainable_pages and all(c.can_admit(facts) for c in self.companions)
        if not fits or (pages := self._alloc(needed)) is None:
            self._free(self.cache.unlock(match.node))
            return None
        taken = self.rows.alloc()
        assert taken is not None, "rows.available was positive above"
        row, generation = taken
        self._fill(row, match.pages, pages, salt)
        self._nodes[row] = match.node
        for companion in self.companions:
            companion.admitted(row, facts)
        return Seat(row, generation, len(match.pages) * self.page_size)

    def _fill(self, row: int, shared: Ints, private: Ints, salt: str) -> None:
        found = len(shared)
        pages = np.concatenate([shared, private]) if found else private
        self._pages[row, : len(pages)] = pages
        # Of a free row no page is owned.
        self._owned[row, found : len(pages)] = True
        self._count[row] = len(pages)
        self._cached[row] = self._shared[row] = found * self.page_size
        self._salts[row] = salt
        self._writes.note_first(row, pages)

    def _node(self, row: int) -> PrefixNode:
        node = self._nodes[row]
        assert node is not None, "the owner of a row holds a prefix, if only the empty one"
        return node

    def _alloc(self, count: int) -> Ints | None:
        short = count - self.allocator.available
        if short > 0:
            self._free(self.cache.evict(short))
        return self.allocator.alloc(count)

    def _free(self, pages: Ints) -> None:
        """Return `pages`, which have no owner now, to the allocator; every companion drops what it kept for them.

        Leased pages go there when their lease ends. What was kept for them goes at once: no request finds it any more.
        """
        if not len(pages):
            return
        self.sound.forget(pages)
        for companion in self.companions:
            companion.freed(pages)
        self.allocator.free(self.leases.divert(pages))

    def grow(self, rows: Ints) -> bool:
        """One more page for each of `rows`, int64[n], all different; False, and no change but evictions, if too few."""
        if len(rows) == 0:
            return True
        pages = self._alloc(len(rows)) if all(c.can_grow(rows) for c in self._growing) else None
        if pages is None:
            return False
        for companion in self._growing:
            companion.grown(rows)
        places = self._count[rows]
        self._pages[rows, places] = pages
        self._owned[rows, places] = True
        self._count[rows] += 1
        self._writes.note(rows, places, pages)
        return True

    def needs_page(self, rows: Ints, positions: Ints) -> np.ndarray:
        """bool[n]: whether `rows[i]` has no page yet for the token at `positions[i]`; int64[n] both."""
        short: np.ndarray = positions >= self._count[rows] * self.page_size
        return short

    def missing_pages(self, rows: Ints, tokens: Ints) -> int:
        """How many pages `rows` lack to hold `tokens` each; int64[n] both."""
        return int((-(-tokens // self.page_size) - self._count[rows]).clip(0).sum())

    def take_writes(self) -> TableWrites:
        """Table entries noted since the last call, in order. The very next batch must carry them."""
        return self._writes.take()

    def plan_companions(self, rows: Ints, prefix_lens: Ints, extend_lens: Ints, ahead: Ints | None = None) -> Writes:
        """What companions apply on the device before a step that computes so much; int64[B] each, as in `planned`."""
        if not self.companions:
            return NO_WRITES
        # Only as wide as the longest row: copying the full width of the context would cost as much as planning.
        pages = self._pages[:, : int(self._count[rows].max(initial=0))][rows]
        found = ((c.name, c.planned(rows, prefix_lens, extend_lens, pages, ahead)) for c in self.companions)
        return {name: writes for name, writes in found if writes is not None}

    def takes(self, row: int) -> bool:
        """Whether the cache keeps anything of the owner of `row`: else nothing need be offered."""
        return self.cache.takes(self._salts[row])

    def offer(self, row: int, ids: Ints) -> None:
        """Give the whole pages that hold `ids` to the cache, where later requests find them; the row keeps using them.

        Steps already submitted, or the one being planned, write the KV of `ids`. Where another row was first with the
        same tokens, nothing is given until release: held twice, the prefix could keep out a request that fits alone.
        """
        tokens = len(ids) // self.page_size * self.page_size
        cached = int(self._cached[row])
        if tokens <= cached or self.cache.peek(ids, tokens, self._salts[row]) > cached:
            return
        count = tokens // self.page_size
        result = self.cache.insert(ids[:tokens], self._pages[row, :count], self._salts[row], cached)
        if result.node is None:
            return
        check("page_conservation", len(result.duplicate_pages) == 0, duplicates=len(result.duplicate_pages))
        self.cache.lock(result.node)
        # The new lock comes first: its node ends a longer prefix of the same path, so no page is ever without a lock.
        self._free(self.cache.unlock(self._node(row)))
        self._nodes[row] = result.node
        self._free(self.leases.adopted(self._pages[row, cached // self.page_size : count], result.node))
        self._owned[row, :count] = False
        self._cached[row] = tokens

    def release(self, row: int, generation: int, ids: Ints) -> None:
        """Give back `row` and its pages. The cache takes whole pages that hold `ids`, except those it has already."""
        for companion in self.companions:
            companion.released(row)
        self.rows.free(row, generation)
        self._writes.forget(row)
        count, held = len(ids) // self.page_size, int(self._count[row])
        owned = self._owned[row, :held]
        if self.takes(row) and count * self.page_size > self._cached[row]:
            pages = self._pages[row, :count]
            # While the row's lock still holds: `insert` relies on the first `_cached` tokens being in the cache.
            result = self.cache.insert(ids[: count * self.page_size], pages, self._salts[row], int(self._cached[row]))
            if result.node is not None:
                # The row still owns the duplicates. Companions learn of them before they are freed below.
                owned[:count] &= np.isin(pages, result.duplicate_pages)
                self._free(self.leases.adopted(pages[self._cached[row] // self.page_size :], result.node))
                for companion in self.companions:
                    companion.replaced(result.duplicate_pages, result.original_pages)
        left = self._pages[row, :held][owned]
        self._free(self.cache.unlock(self._node(row)))
        self._free(left)
        self._nodes[row] = None
        self._count[row] = 0
        owned[:] = False

    def lend(self, row: int, tokens: int, deadline: float | None = None, *, start: int = 0) -> int:
        """Lease the pages of the first `tokens` tokens of `row` from token `start` on, a multiple of the page size.

        Returns the number of the lease. `deadline`: see `Lease`.
        """
        return self.leases.hold(self.pages_of(row, tokens)[start // self.page_size :], self._node(row), deadline)

    def pages_of(self, row: int, tokens: int) -> Ints:
        """int64[n]: the pages of the first `tokens` tokens of `row`, in order; a view."""
        return self._pages[row, : self.allocator.pages_for(tokens)]

    def reclaim(self, lease: int) -> None:
        """The transfer of `lease` is over. Raises InvariantViolation for a second end."""
        free, given_up = self.leases.end(lease)
        self.allocator.free(free)
        self._free(given_up)

    def vouch(self, row: int, tokens: int) -> None:
        """The first `tokens` of `row` led to finite logits: see `SoundPages`."""
        self.sound.vouch(self._pages[row], tokens)

    def doubt(self, row: int, ids: Ints, computed_from: int) -> Doubt:
        """What must leave the cache because numbers of `row`, which holds `ids`, proved wrong. May split cache nodes.

        (1) What the row computed: its tokens from `computed_from` on. (2) What it read, from the first page on that
        `vouch` has not marked: its owner ended before it had logits, say. The fault may lie there, and later readers
        would fail too. `row` and the readers must be released, keeping nothing, before `condemn`.
        """
        shared = self._pages[row, : self._shared[row] // self.page_size]
        sound = self.sound.leading(shared)
        kept = computed_from if sound == len(shared) else min(computed_from, sound * self.page_size)
        top = self.cache.behind(ids, kept, self._salts[row])
        readers = () if top is None else (r for r, n in enumerate(self._nodes) if n is not None and top.leads_to(n))
        return Doubt(top, tuple(reader for reader in readers if reader != row))

    def condemn(self, doubt: Doubt) -> None:
        """Drop everything that `doubt` is about from the cache: no later request finds it. Leases keep their pages."""
        if doubt.node is not None:
            self._free(self.leases.adrift(doubt.node))
            self._free(self.cache.condemn(doubt.node))

    def flush(self, tenant: str | None = None) -> int:
        """Free every cached page that no row reads, of `tenant` only if given; returns how many. Not within a plan."""
        # A transfer keeps its pages out of the free list, and none of them in the cache.
        self._free(self.leases.let_go(tenant))
        pages = self.cache.clear(tenant)
        self._free(pages)
        return len(pages)

    def pages_found(self, rows: Ints) -> Ints:
        """int64[n]: how many pages of each of `rows`, int64[n], were cached when its owner was admitted."""
        return self._shared[rows] // self.page_size

    def pages_taken(self, rows: Ints) -> Ints:
        """int64[n]: how many pages each of `rows`, int64[n], was given itself, those it put into the cache included."""
        return self._count[rows] - self.pages_found(rows)

    def owned_pages(self) -> int:
        """Pages owned by rows, not by the cache."""
        return int(self._owned.sum())

    def stats(self) -> tuple[PoolStats, ...]:
        """Occupancy of rows and pages; `used` pages include cached ones that a running request holds locked."""
        cached = self.cache.evictable_pages
        return (
            PoolStats("req", self.rows.size, self.rows.used),
            PoolStats("kv_page", self.allocator.num_pages, self.allocator.held - cached, cached),
            *(stats for companion in self.companions for stats in companion.stats()),
        )

    def check_integrity(self) -> None:
        """Every row and page is free, owned once, cached, or leased; raises InvariantViolation naming what is off."""
        self.rows.check_integrity()
        self.allocator.check_integrity()
        self.cache.check_integrity()
        self.leases.check_integrity()
        for companion in self.companions:
            companion.check_integrity()
        owned = self._pages[self._owned]
        check("page_conservation", len(np.unique(owned)) == len(owned), owned=len(owned))
        total, held = len(owned) + self.cache.cached_pages + self.leases.diverted, self.allocator.held
        check("page_conservation", total == held, owned=len(owned), leased=self.leases.diverted, held=held)
