"""Which window pages stand for which KV pages, and which rows need them. Host side of the "swa_page" pool."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from core.invariants import check
from core.memory.companion import AdmissionFacts
from core.memory.window.window_bounds import WindowBounds
from core.types.arrays import Ints
from core.types.stats import PoolStats

NAME = "swa_page"


@dataclass(frozen=True, slots=True)
class WindowWrites:
    """Entries of the device table (KV page -> window page) that changed since the last step; int64[n] each.

    KV page `pages[i]`, all different, now has window page `windows[i]`, or none where that is 0.
    """

    pages: Ints
    windows: Ints


class WindowPages:
    """Window pages 1..size, each free or standing for one KV page; page 0 is padding and never leaves (law 6).
    A `Companion`, `Growing`, and `Trailing`.

    A row uses the pages from its window's first key to its newest token. A page that every row has passed is idle: it
    keeps its contents, in case a later request resumes behind it, until a row needs room or its KV page is freed. So
    this class needs to know nothing of the prefix cache. A page is passed when the last step that reads it is planned.
    The step that overwrites it is later, and the one FIFO puts it behind (law 4).

    `planned` cannot refuse, so admission and growth reserve the worst case: (a) up to `bounds.per_row` of the pages
    that each row did not find in the cache; (b) one step's prompt chunk, counted once for all rows; (c) each page that
    some row found in the cache, counted once, since the row that computed it may pass it before its readers do. A row
    that runs alone is bounded by `fits_alone` instead.
    """

    name = NAME

    def __init__(self, size: int, num_kv_pages: int, num_rows: int, bounds: WindowBounds) -> None:
        check("window_page_conservation", size >= 1, size=size)
        self.size = size
        self.bounds = bounds
        self._window_of: Ints = np.zeros(num_kv_pages + 1, np.int64)
        """By KV page: its window page or 0. Invariant: non-zero entries are distinct and disjoint from `_free`."""
        self._users: Ints = np.zeros(num_kv_pages + 1, np.int64)
        """By KV page: how many rows need it inside their window."""
        self._guests: Ints = np.zeros(num_kv_pages + 1, np.int64)
        """By KV page: how many of its users found it in the cache."""
        self._shared = 0
        """Invariant: how many KV pages have guests."""
        self._free = list(range(size, 0, -1))
        self._idle: dict[int, None] = {}
        """Invariant: KV pages that have a window page and no users, the least recently used first."""
        self._uses: list[deque[int]] = [deque() for _ in range(num_rows)]
        """By request row: the KV pages that it needs, those at [`_first`, `_end`) among all of its pages."""
        self._first: Ints = np.zeros(num_rows, np.int64)
        self._end: Ints = np.zeros(num_rows, np.int64)
        self._behind: Ints = np.zeros(num_rows, np.int64)
        """By request row: how many of its pages it found in the cache."""
        self._own: Ints = np.zeros(num_rows, np.int64)
        """By request row: how many of its KV pages it did not find in the cache; above 0 for every running row."""
        self._changed: dict[int, int] = {}
        """KV page -> its new entry, where the device table has an old one."""
        self._given: set[int] = set()
        """KV pages that got the window page of a duplicate since the last step was planned."""

    @property
    def available(self) -> int:
        """Pages that could be handed out now."""
        return len(self._free) + len(self._idle)

    def window_of(self, page: int) -> int:
        """The window page that stands for KV page `page`; 0 when none does."""
        return int(self._window_of[page])

    def resumable(self, pages: Ints) -> int:
        """Length of the longest prefix of `pages` for which every page of its last window has a window page."""
        places = np.arange(len(pages))
        # By place: the last page up to it that has no window page, -1 for none.
        missing = np.maximum.accumulate(np.where(self._window_of[pages] == 0, places, -1))
        firsts = self.bounds.first_places((places + 1) * self.bounds.page_size)
        whole = np.flatnonzero(missing < firsts)
        return int(whole[-1]) + 1 if len(whole) else 0

    def fits_alone(self, total_tokens: int, encoder_tokens: int) -> bool:
        """Whether the whole pool holds a row of `total_tokens`, which never has more than `bounds.alone` pages."""
        return min(self.bounds.pages_for(total_tokens), self.bounds.alone) <= self.size

    def can_admit(self, facts: AdmissionFacts) -> bool:
        """Whether the worst case fits with the new row, and with one more page for it and each running row.

        Without that page rows would be retracted soon after the admission.
        """
        return self._has_room(facts.tokens, facts.cached, self._own, self._guests, self._shared)

    def would_admit(self, facts: AdmissionFacts, leaving: Ints) -> bool:
        """Whether the worst case fits with the new row and without rows `leaving`, as `can_admit` would find then."""
        own, guests = self._own.copy(), self._guests.copy()
        own[leaving] = 0
        for row in leaving.tolist():
            # Pages that a row found in the cache come first among its pages.
            found = max(0, int(self._behind[row] - self._first[row]))
            guests[[self._uses[row][place] for place in range(found)]] -= 1
        return self._has_room(facts.tokens, facts.cached, own, guests, int((guests > 0).sum()))

    def admitted(self, row: int, facts: AdmissionFacts) -> None:
        """Count `row` as a user and guest of the cached pages inside its window, and charge it the pages to come.

        `facts.known` is not used: window pages stay for every KV page, so none has to be kept where prompts diverge.
        """
        check("row_padding_reserved", row > 0, row=row)
        check("window_page_conservation", self._own[row] == 0, row=row, own=int(self._own[row]))
        cached = facts.cached
        needed = self._needed(cached)
        check("window_page_present", bool((self._window_of[needed] > 0).all()), row=row, cached=len(cached))
        self._shared += int((self._guests[needed] == 0).sum())
        self._guests[needed] += 1
        self._users[needed] += 1
        for page in needed.tolist():
            self._idle.pop(page, None)
            self._uses[row].append(page)
        self._behind[row] = self._end[row] = len(cached)
        self._first[row] = len(cached) - len(needed)
        self._own[row] = self.bounds.pages_for(facts.tokens) - len(cached)

    def can_grow(self, rows: Ints) -> bool:
        """Whether the worst case still fits when each of `rows` has one page more."""
        own = self._own.copy()
        own[rows] += 1
        return self._holds(own, self._shared)

    def grown(self, rows: Ints) -> None:
        """Charge each of `rows` one page more."""
        self._own[rows] += 1

    def planned(
        self, rows: Ints, prefix_lens: Ints, extend_lens: Ints, pages: Ints, ahead: Ints | None = None
    ) -> WindowWrites | None:
        """Give a window page to every KV page that the step may begin, then pass the pages that no later step reads.

        Drafts that prove wrong leave a row shorter than it may be, so pages begin by the most tokens that it may have,
        and are passed by the least (llama.cpp #18727 passed them by the most).
        """
        unread = self.bounds.first_places(prefix_lens) - self._first[rows]
        whole = (prefix_lens <= self._end[rows] * self.bounds.page_size).all()
        check("window_page_present", bool(whole and (unread >= 0).all()), rows=rows, prefix_lens=prefix_lens)
        if ahead is not None:
            # Results since the last plan of these rows told how long they are: that much less can be in doubt at once.
            self._pass_all(rows, unread)
        least = prefix_lens + extend_lens
        most = least if ahead is None else least + ahead
        ends = -(-most // self.bounds.page_size)
        for place in np.flatnonzero(ends > self._end[rows]).tolist():
            row = int(rows[place])
            self._begin(row, pages[place, self._end[row] : ends[place]].tolist())
        writes = self._writes()
        # Passed last: this step still reads these pages, so none may be taken for one that it begins above.
        self._pass_all(rows, self.bounds.first_places(least) - self._first[rows])
        self._given.clear()
        return writes

    def slots_for(self, pages: int) -> int:
        """See `Portable`: the tokens of the last window, in whole pages."""
        return len(self._needed(np.arange(pages))) * self.bounds.page_size

    def leaves(self, pages: Ints) -> Ints | None:
        """See `Portable`. A page that the row has passed may have gone to another row since."""
        return self.slots_of(self._needed(pages))

    @property
    def trail(self) -> int:
        """See `Trailing`: the pages that hold the newest `window` - 1 tokens behind the end of a page."""
        return (self.bounds.window + self.bounds.page_size - 2) // self.bounds.page_size

    def slots_of(self, pages: Ints) -> Ints | None:
        """See `Trailing`."""
        windows = self._window_of[pages]
        return self._slots(windows) if windows.all() else None

    def resumes(self, row: int, pages: Ints) -> Ints:
        """See `Portable`: the pages inside its window are begun now."""
        needed = self._needed(pages)
        check("window_page_conservation", self._end[row] == 0, row=row, end=int(self._end[row]))
        self._first[row] = self._end[row] = len(pages) - len(needed)
        self._begin(row, needed.tolist())
        return self._slots(self._window_of[needed])

    def released(self, row: int) -> None:
        """Pass all pages of `row`. Raises InvariantViolation on a second release."""
        check("window_page_conservation", self._own[row] > 0, row=row)
        self._pass(row, len(self._uses[row]))
        self._first[row] = self._end[row] = self._behind[row] = self._own[row] = 0

    def replaced(self, pages: Ints, originals: Ints) -> None:
        """Give the window page of a duplicate to its original, where that one had lost its own to a row in need."""
        revived = (self._window_of[pages] > 0) & (self._window_of[originals] == 0)
        for page, original in zip(pages[revived].tolist(), originals[revived].tolist(), strict=True):
            self._window_of[original] = self._changed[original] = self._forget(page)
            self._idle[original] = None
            self._given.add(original)

    def freed(self, pages: Ints) -> None:
        """Free the window pages of KV `pages`. Raises InvariantViolation if a row still needs one inside its window."""
        gone = pages[self._window_of[pages] > 0]
        check("window_page_needed", not self._users[gone].any(), pages=gone)
        for page in gone.tolist():
            self._free.append(self._forget(page))

    def stats(self) -> tuple[PoolStats, ...]:
        """Window pages that some row needs, and idle ones, which later requests may find."""
        return (PoolStats(NAME, self.size, self.size - self.available, len(self._idle)),)

    def check_integrity(self) -> None:
        """Recompute owners, users and guests; raises InvariantViolation naming what is off."""
        mapped = self._window_of[self._window_of > 0].tolist()
        every, facts = sorted([*self._free, *mapped]), {"free": len(self._free), "mapped": len(mapped)}
        check("window_page_conservation", every == list(range(1, self.size + 1)), **facts)
        check("row_padding_reserved", not self._uses[0] and self._own[0] == 0)
        users, guests = np.zeros_like(self._users), np.zeros_like(self._guests)
        for row, uses in enumerate(self._uses):
            held = np.fromiter(uses, np.int64, len(uses))
            check("window_page_conservation", len(held) == self._end[row] - self._first[row], row=row, held=len(held))
            check("window_page_present", bool((self._window_of[held] > 0).all()), row=row)
            users[held] += 1
            guests[held[: max(0, int(self._behind[row] - self._first[row]))]] += 1
        check("window_page_conservation", bool((users == self._users).all()), users=int(self._users.sum()))
        check("window_page_conservation", bool((guests == self._guests).all()), guests=int(self._guests.sum()))
        check("window_page_conservation", int((guests > 0).sum()) == self._shared, shared=self._shared)
        idle = np.flatnonzero((self._window_of > 0) & (users == 0)).tolist()
        check("window_page_conservation", sorted(self._idle) == idle, idle=len(self._idle), counted=len(idle))

    def _slots(self, windows: Ints) -> Ints:
        """int64[n * page_size]: the places of window pages `windows`, int64[n], in the pool."""
        size = self.bounds.page_size
        slots: Ints = (windows[:, None] * size + np.arange(size)).ravel()
        return slots

    def _has_room(self, tokens: int, cached: Ints, own: Ints, guests: Ints, shared: int) -> bool:
        """Whether a new row fits beside rows with `own` pages each, and `shared` KV pages that have `guests`."""
        own = np.append(own, self.bounds.pages_for(tokens) - len(cached))
        # The next page of each running row and of the new one; a row at `per_row` is charged no more.
        own += (own > 0) & (own < self.bounds.per_row)
        needed = self._needed(cached)
        return self._holds(own, shared + int((guests[needed] == 0).sum()))

    def _needed(self, cached: Ints) -> Ints:
        """The pages of `cached` inside the window of a row that resumes behind them."""
        start = np.array([len(cached) * self.bounds.page_size])
        return cached[int(self.bounds.first_places(start)[0]) :]

    def _holds(self, own: Ints, shared: int) -> bool:
        """Whether the worst case fits for rows with `own` pages each, beside `shared` pages found in the cache."""
        # With a window page for every KV page none can be missing; a single row is bounded by `fits_alone`.
        if self.size >= len(self._window_of) - 1 or np.count_nonzero(own) <= 1:
            return True
        charged = int(np.minimum(own, self.bounds.per_row).sum())
        return charged + shared + min(self.bounds.per_step, int(own.sum()) - charged) <= self.size

    def _begin(self, row: int, pages: list[int]) -> None:
        """The coming step writes the first tokens of `row` into KV `pages`: give each a window page.

        One may have that of a duplicate already. A page is in the prefix cache as soon as its chunk is planned, and a
        request that gives way later in that plan leaves the window page of its own copy to it.
        """
        for page in pages:
            check("window_page_conservation", self._window_of[page] == 0 or page in self._given, row=row, page=page)
            if self._window_of[page] == 0:
                window = self._free.pop() if self._free else self._forget(next(iter(self._idle)))
                self._window_of[page] = self._changed[page] = window
            self._idle.pop(page, None)
            self._users[page] += 1
        self._uses[row] += pages
        self._end[row] += len(pages)

    def _pass_all(self, rows: Ints, counts: Ints) -> None:
        """Each of `rows` no longer needs the first `counts` of its pages; int64[n] both."""
        for place in np.flatnonzero(counts > 0).tolist():
            self._pass(int(rows[place]), int(counts[place]))

    def _pass(self, row: int, count: int) -> None:
        """`row` no longer needs the first `count` pages of `_uses[row]`; those without another user become idle."""
        uses, first = self._uses[row], int(self._first[row])
        for place in range(first, first + count):
            page = uses.popleft()
            self._users[page] -= 1
            if place < self._behind[row]:
                self._guests[page] -= 1
                self._shared -= int(self._guests[page] == 0)
            if self._users[page] == 0:
                self._idle[page] = None
        self._first[row] += count

    def _forget(self, page: int) -> int:
        """Take the window page away from an idle KV page, and return it."""
        del self._idle[page]
        window = int(self._window_of[page])
        self._window_of[page] = self._changed[page] = 0
        return window

    def _writes(self) -> WindowWrites | None:
        if not self._changed:
            return None
        changed, self._changed = self._changed, {}
        size = len(changed)
        return WindowWrites(np.fromiter(changed, np.int64, size), np.fromiter(changed.values(), np.int64, size))
