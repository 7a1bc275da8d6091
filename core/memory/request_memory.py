"""Rows, KV pages and cached prefixes of the running requests, taken and given back together.

The one place where the three meet, so that "both or neither" and "freed once" are properties of one file. Host state
only; what must change in the device table leaves as `TableWrites` inside the next submitted batch (law 2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from core.invariants import check
from core.memory.companion import AdmissionFacts, Companion, Growing, Writes
from core.memory.kv_allocator import PagedKVAllocator
from core.memory.pending_writes import PendingWrites
from core.memory.req_to_token_pool import TableWrites
from core.memory.rows import RowAllocator
from core.prefix.base import PrefixCache, PrefixMatch
from core.prefix.node import PrefixNode
from core.types.arrays import Ints
from core.types.stats import PoolStats

NO_WRITES: Writes = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Seat:
    """A row with pages for every token of the prompt; the first `cached_tokens` of them are already computed."""

    row: int
    generation: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Doubt:
    """A part of the prefix cache that no request may find again, and its readers without the row that failed."""

    node: PrefixNode | None
    """Where it begins; None when the cache has nothing of it."""
    readers: tuple[int, ...]


class RequestMemory:
    """What each running row holds: `pages[row, :count]`, of which `owned` ones go back to the allocator on release.

    A page of a row is either owned by the row or by the prefix cache, where the row's lock on `node` keeps it. Pages
    are offered to the cache while a prompt is still being computed: a reader admitted later runs later in the one
    FIFO, so it finds them written (law 4). That is how requests that arrive together share a prefix. Pools of other
    kinds come along as `companions`.
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
        self.companions = tuple(companions)
        self._reach = max_len if reach is None else reach
        self._growing = tuple(c for c in self.companions if isinstance(c, Growing))
        self.page_size = allocator.page_size
        width = allocator.pages_for(max_len)
        shape = (rows.size + 1, width)
        self._pages: Ints = np.zeros(shape, np.int64)
        self._owned = np.zeros(shape, np.bool_)
        self._count: Ints = np.zeros(rows.size + 1, np.int64)
        self._cached: Ints = np.zeros(rows.size + 1, np.int64)
        self._shared: Ints = np.zeros(rows.size + 1, np.int64)
        """By row: tokens that were cached when it was admitted, so that its owner reads what others computed."""
        self._sound = np.zeros(allocator.num_pages + 1, np.bool_)
        """By page: finite logits came of it. False for what no logits have come of so far."""
        self._nodes: list[PrefixNode | None] = [None] * (rows.size + 1)
        self._salts: list[str] = [""] * (rows.size + 1)
        self._writes = PendingWrites(self.page_size)

    @property
    def obtainable_pages(self) -> int:
        """Pages that could be handed out now: free ones, and cached ones that nobody uses."""
        return self.allocator.available + self.cache.evictable_pages

    def fits_alone(self, total_tokens: int, encoder_tokens: int = 0) -> bool:
        """Whether a request of so many tokens could be served by an empty pool: the check at entry."""
        if self.allocator.pages_for(total_tokens) > self.allocator.num_pages:
            return False
        return all(c.fits_alone(total_tokens, encoder_tokens) for c in self.companions)

    def would_admit(
        self, ids: Ints, salt: str, reserve_pages: int, leaving: Ints, *, reuse: bool = True, encoder_tokens: int = 0
    ) -> int | None:
        """Whether `admit` would succeed once the owners of rows `leaving`, int64[k >= 1], have given them back.

        Returns the cached tokens that it counts on: with them as `at_most`, `admit` succeeds if these releases are all
        that happens in between. None: it would not succeed. Changes nothing but recency.
        """
        match, known = self._match(ids, len(ids) - 1 if reuse else 0, salt)
        facts = AdmissionFacts(len(ids), match.pages, known, encoder_tokens)
        needed = self.allocator.pages_for(len(ids)) - len(match.pages)
        # Under this lock the newcomer's own prefix is not counted as a page that comes free.
        self.cache.lock(match.node)
        coming = int(self._owned[leaving].sum()) + self.cache.held_only_by(
            [self._node(row) for row in leaving.tolist()]
        )
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
        reuse: bool = True,
        encoder_tokens: int = 0,
        adapter_slot: int = 0,
        at_most: int | None = None,
    ) -> Seat | None:
        """Take a row and pages for all of `ids`, sharing what the cache has; None (and no change) when it does not fit.

        `reserve_pages` must stay obtainable afterwards, for the decode steps of those already running. At least one
        token is always left to compute, because its logits are what the first output is sampled from; with `reuse` off
        all of them are. `encoder_tokens`, `adapter_slot`: see `AdmissionFacts`; `at_most`: see `would_admit`.
        """
        if not self.rows.available:
            return None
        limit = len(ids) - 1 if reuse else 0
        match, known = self._match(ids, limit if at_most is None else min(limit, at_most), salt)
        facts = AdmissionFacts(len(ids), match.pages, known, encoder_tokens, adapter_slot)
        needed = self.allocator.pages_for(len(ids)) - len(match.pages)
        self.cache.lock(match.node)
        pages = None
        if needed + reserve_pages <= self.obtainable_pages and all(c.can_admit(facts) for c in self.companions):
            pages = self._alloc(needed)
        if pages is None:
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

    def _match(self, ids: Ints, limit: int, salt: str) -> tuple[PrefixMatch, int]:
        """The longest cached prefix that every companion can resume from, and how many pages were cached at all."""
        match = self.cache.match(ids, limit, salt)
        known = len(match.pages)
        while usable := len(match.pages):
            usable = min((c.resumable(match.pages) for c in self.companions), default=usable)
            if usable == len(match.pages):
                break
            match = self.cache.match(ids, usable * self.page_size, salt)
        return match, known

    def _fill(self, row: int, shared: Ints, private: Ints, salt: str) -> None:
        count = len(shared) + len(private)
        self._pages[row, : len(shared)] = shared
        self._pages[row, len(shared) : count] = private
        self._owned[row, :count] = False
        self._owned[row, len(shared) : count] = True
        self._count[row] = count
        self._cached[row] = self._shared[row] = len(shared) * self.page_size
        self._salts[row] = salt
        self._writes.note(np.full(count, row), np.arange(count), self._pages[row, :count].copy())

    def _node(self, row: int) -> PrefixNode:
        node = self._nodes[row]
        assert node is not None, "who owns a row holds a prefix, if only the empty one"
        return node

    def _alloc(self, count: int) -> Ints | None:
        short = count - self.allocator.available
        if short > 0:
            self._free(self.cache.evict(short))
        return self.allocator.alloc(count)

    def _free(self, pages: Ints) -> None:
        """Pages without an owner: back to the allocator, and out of every companion's books."""
        self.allocator.free(pages)
        self._sound[pages] = False
        if len(pages):
            for companion in self.companions:
                companion.freed(pages)

    def grow(self, rows: Ints) -> bool:
        """One more page for each of `rows`; False, and no change but evictions, when there are not enough."""
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
        """bool[n]: rows whose pages do not reach position `positions[i]` yet."""
        short: np.ndarray = positions >= self._count[rows] * self.page_size
        return short

    def slots(self, rows: Ints, positions: Ints) -> Ints:
        """int64[n]: the KV slot of each (row, position)."""
        pages = self._pages[rows, positions // self.page_size]
        slots: Ints = pages * self.page_size + positions % self.page_size
        return slots

    def take_writes(self) -> TableWrites:
        """Table entries noted since the last call, in order; they belong into the very next batch."""
        return self._writes.take()

    def plan_companions(self, rows: Ints, prefix_lens: Ints, extend_lens: Ints) -> Writes:
        """What the companions' device sides must apply before the step that computes these tokens; see `Companion`."""
        if not self.companions:
            return NO_WRITES
        # A row as wide as the context is mostly empty, and copying it for all rows would cost as much as planning them.
        pages = self._pages[:, : int(self._count[rows].max(initial=0))][rows]
        found = ((c.name, c.planned(rows, prefix_lens, extend_lens, pages)) for c in self.companions)
        return {name: writes for name, writes in found if writes is not None}

    def offer(self, row: int, ids: Ints) -> None:
        """Give the whole pages that hold `ids` to the cache, where later requests find them; the row keeps using them.

        `ids` are known tokens whose KV is written by steps already submitted, or by the one being planned. Where
        another row put the same tokens first, nothing is given until release: locking its pages beside our own copies
        would hold the prefix twice, and a request that fits alone would no longer fit.
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
        # The new node ends a longer prefix of the same path, so nothing that the old lock kept is lost in between.
        self._free(self.cache.unlock(self._node(row)))
        self._nodes[row] = result.node
        self._owned[row, :count] = False
        self._cached[row] = tokens

    def release(self, row: int, generation: int, ids: Ints) -> None:
        """Give back row and pages; whole pages that hold `ids` stay behind in the cache, which drops its duplicates."""
        for companion in self.companions:
            companion.released(row)
        self.rows.free(row, generation)
        self._writes.forget(row)
        count = len(ids) // self.page_size
        owned = self._owned[row]
        if count * self.page_size > self._cached[row]:
            pages = self._pages[row, :count]
            result = self.cache.insert(ids[: count * self.page_size], pages, self._salts[row], int(self._cached[row]))
            if result.node is not None:
                owned[:count] &= np.isin(pages, result.duplicate_pages)
                for companion in self.companions:
                    companion.replaced(result.duplicate_pages, result.original_pages)
        left = self._pages[row][owned]
        self._free(self.cache.unlock(self._node(row)))
        self._free(left)
        self._nodes[row] = None
        self._count[row] = 0
        owned[:] = False

    def vouch(self, row: int, tokens: int) -> None:
        """The first `tokens` of `row` led to finite logits. A NaN in any key within reach would have reached those."""
        first = -(-max(0, tokens - self._reach) // self.page_size)
        self._sound[self._pages[row, first : tokens // self.page_size]] = True

    def shared(self, row: int) -> int:
        """Tokens that `row` found in the cache: it reads them and computed none of them."""
        return int(self._shared[row])

    def doubt(self, row: int, ids: Ints, computed_from: int) -> Doubt:
        """What must go when the numbers of `row` proved wrong, which holds `ids` and computed those from
        `computed_from` on.

        Where it read pages of others that nothing vouches for, the fault may be theirs: those whose owner left or gave
        way before it had logits, say. They go as well, else every request behind them would fail like this one.
        Changes nothing that anybody could tell; the rows must be released, with nothing to keep, before `condemn`.
        """
        sound = self._sound[self._pages[row, : self._shared[row] // self.page_size]]
        kept = computed_from if sound.all() else min(computed_from, int(sound.argmin()) * self.page_size)
        top = self.cache.behind(ids, kept, self._salts[row])
        readers = () if top is None else (r for r, n in enumerate(self._nodes) if n is not None and top.leads_to(n))
        return Doubt(top, tuple(reader for reader in readers if reader != row))

    def condemn(self, doubt: Doubt) -> None:
        """Give up everything that `doubt` is about: no later request finds it."""
        if doubt.node is not None:
            self._free(self.cache.condemn(doubt.node))

    def flush(self, tenant: str | None = None) -> int:
        """Give up every cached page, of `tenant` if it is named, that no row reads; how many. Not within a plan."""
        pages = self.cache.clear(tenant)
        self._free(pages)
        return len(pages)

    def pages_found(self, rows: Ints) -> Ints:
        """int64[n]: pages of each of `rows` that were cached when its owner was admitted."""
        return self._shared[rows] // self.page_size

    def pages_taken(self, rows: Ints) -> Ints:
        """int64[n]: pages that each of `rows` was given for itself, those that it has put into the cache included."""
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
        """Every row and page is free, owned once, or cached; raises InvariantViolation naming what is off."""
        self.rows.check_integrity()
        self.allocator.check_integrity()
        self.cache.check_integrity()
        for companion in self.companions:
            companion.check_integrity()
        owned = self._pages[self._owned]
        check("page_conservation", len(np.unique(owned)) == len(owned), owned=len(owned))
        held = self.allocator.held
        check("page_conservation", len(owned) + self.cache.cached_pages == held, owned=len(owned), held=held)
