"""Which recurrent state slots are free, held by a running request, or kept as snapshots. Host side of "mamba"."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from core.invariants import check
from core.memory.companion import AdmissionFacts
from core.memory.recurrent.state_snapshots import StateSnapshots, Tracking
from core.types.arrays import Bools, Ints
from core.types.stats import PoolStats

NAME = "mamba"
NOTHING: Ints = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Tracked:
    """Snapshots that the coming step takes: of batch row `places[i]` with `ends[i]` tokens, in `slots[i]`.

    Where speculation is on, a snapshot is not taken if the row does not come so far in the step, or was there before.
    """

    places: Ints = field(default_factory=NOTHING.copy)
    """int64[n], ascending: indices into the rows of the batch. A row with several snapshots repeats."""
    ends: Ints = field(default_factory=NOTHING.copy)
    """int64[n], tokens of the row's sequence, each among those that the step may compute; ascending within a place."""
    slots: Ints = field(default_factory=NOTHING.copy)
    """int64[n], no duplicates."""


@dataclass(frozen=True, slots=True)
class StateWrites:
    """Requests that got a slot since the last step; int64[n] each.

    `rows[i]` now maps to `slots[i]`, which first becomes a copy of slot `sources[i]`, or zeros where that is 0. All
    sources are read before any slot is written.
    """

    rows: Ints
    slots: Ints
    sources: Ints
    tracked: Tracked = field(default_factory=Tracked)


class StateSlots:
    """Slots 1..size: one for each running request, the others free or holding a snapshot for a page. A `Companion`.

    Slot 0 is padding and never handed out (law 6). The number of slots is independent of the number of request rows: a
    request is admitted when both have room. A state can be neither rolled back nor rebuilt from pages, so a cached
    prefix can be used only up to its last page with a snapshot. A snapshot belongs to its page from the step that
    writes it (the one FIFO orders readers behind it), so it stays when the row is freed. Admission copies it, and no
    request needs it afterwards: every snapshot may be dropped for a running request, the least recently used first.

    Where drafts are verified, a plan knows only between which lengths a row will be. The snapshot at a page's end is
    then due in every step that may reach it, in the same slot, and the device takes it in the one that does. That is
    sound since a page is found by others only once its tokens are known, so the row was there. A slot that such a page
    has lost is not replaced: the row may be there already, and no later state is the one of that page.

    Not kept: where a plan knows the lengths of a step before its tokens, the oldest of a row's snapshots may give way
    while the newest one is behind tokens that are not known yet. A row that is retracted in that moment resumes from
    less than it could. Outputs are the same. Seen in two simulated stories so far (the last two of the corpus).
    """

    name = NAME

    def __init__(self, size: int, num_rows: int, tracking: Tracking | None = None, draft_room: int = 0) -> None:
        """`draft_room`: slots of the device side, beside these, for states behind drafts; as many may be verified."""
        check("state_slot_conservation", size >= 1, size=size)
        self.size = size
        self.draft_room = draft_room
        self._tracking = tracking
        self._snapshots = StateSnapshots()
        self._marks: Ints = np.zeros((num_rows, 2), np.int64)
        """By request row, the token counts at which its prompt is snapshotted: (1) where it diverges from the cached
        prompts, 0 if it resumes there; (2) the last page boundary that leaves a token of the prompt to compute.
        """
        self._turns: list[deque[int]] = [deque() for _ in range(num_rows)]
        """By request row: pages whose snapshots it took while decoding, the oldest first."""
        self._most: Ints = np.zeros(num_rows, np.int64)
        """By request row: the most tokens that it may have once all steps planned so far are over."""
        self._pending: Ints = np.zeros(num_rows, np.int64)
        """By request row: the newest end of a page at which it is snapshotted while decoding; 0 without one."""
        self._slot_of: Ints = np.zeros(num_rows, np.int64)
        """By request row, 0 for none. Invariant: non-zero entries are distinct and disjoint from `_free`."""
        self._free = list(range(size, 0, -1))
        self._fresh: dict[int, tuple[int, int]] = {}
        """Row -> (slot, source slot) of requests whose first step is not planned yet."""

    @property
    def available(self) -> int:
        """Slots that could be handed out now."""
        return len(self._free) + len(self._snapshots)

    def slot_of(self, row: int) -> int:
        """The slot of the request in `row`; 0 when it has none."""
        return int(self._slot_of[row])

    def resumable(self, pages: Ints) -> int:
        """Length in pages of the longest prefix of `pages` whose last page has a snapshot."""
        return self._snapshots.longest(pages)

    def fits_alone(self, total_tokens: int, encoder_tokens: int) -> bool:
        """True: a state has the same size however long the sequence is."""
        return True

    def can_admit(self, facts: AdmissionFacts) -> bool:
        """Whether a slot is free or holds a snapshot.

        True even if the only such slot holds the snapshot to resume from: it becomes the slot of the request.
        """
        return self.available > 0

    def would_admit(self, facts: AdmissionFacts, leaving: Ints) -> bool:
        """Whether a slot is free, holds a snapshot, or belongs to a row in `leaving`: every running row holds one."""
        return self.available + len(leaving) > 0

    def admitted(self, row: int, facts: AdmissionFacts) -> None:
        """Take a slot for `row`, to start from the snapshot of the last cached page, or from zeros without one."""
        check("row_padding_reserved", row > 0, row=row)
        check("state_slot_conservation", self._slot_of[row] == 0, row=row, held=int(self._slot_of[row]))
        check("state_slot_conservation", self.available > 0, row=row)
        source, cached = 0, facts.cached
        if len(cached):
            page = int(cached[-1])
            source = self._snapshots.find(page)
            check("state_snapshot_present", source > 0, row=row, page=page)
            # Made the youngest before `_take`, which else might drop the very snapshot that is needed.
            self._snapshots.keep(page, source)
            self._snapshots.share(cached.tolist())
        slot = self._take()
        self._slot_of[row] = slot
        self._fresh[row] = (slot, source)
        if self._tracking is not None:
            # tokens - 1: a request that resumes at the very end of its prompt would have no token left to compute.
            last = (facts.tokens - 1) // self._tracking.page_size
            branch = facts.known if len(cached) < facts.known < last else 0
            self._marks[row] = np.array((branch, last)) * self._tracking.page_size

    def planned(
        self, rows: Ints, prefix_lens: Ints, extend_lens: Ints, pages: Ints, ahead: Ints | None = None
    ) -> StateWrites | None:
        """The slots given out since the last step, which still hold old states, and the snapshots this step takes."""
        tracked = self._track(rows, prefix_lens, extend_lens, 0 if ahead is None else ahead, pages)
        if not self._fresh and not len(tracked.places):
            return None
        fresh, self._fresh = self._fresh, {}
        slots, sources = np.array(list(fresh.values()), np.int64).reshape(-1, 2).T
        return StateWrites(np.array(list(fresh.keys()), np.int64), slots, sources, tracked)

    def _track(self, rows: Ints, prefix_lens: Ints, extend_lens: Ints, ahead: Ints | int, pages: Ints) -> Tracked:
        """Slots for the snapshots due in this step. Without a slot a snapshot is skipped: it only saves computing."""
        if self._tracking is None:
            return Tracked()
        ends = prefix_lens + extend_lens + ahead
        kept = self._still_due(rows, prefix_lens, ends, pages)
        for place, at, in_prompt in self._due(rows, prefix_lens, ends, extend_lens == 1, self._tracking):
            # The page that ends at token `at`.
            page = int(pages[place, at // self._tracking.page_size - 1])
            if self._snapshots.find(page):
                continue
            turns = None if in_prompt else self._turns[rows[place]]
            slot = self._slot_for(turns, [slot for *_, slot in kept])
            if slot:
                kept.append((place, at, slot))
                self._snapshots.keep(page, slot)
                if turns is not None:
                    turns.append(page)
                    self._pending[rows[place]] = at
        self._most[rows] = np.maximum(self._most[rows], ends)
        return Tracked(*np.array(sorted(kept), np.int64).reshape(-1, 3).T)

    def _still_due(self, rows: Ints, prefix_lens: Ints, ends: Ints, pages: Ints) -> list[tuple[int, int, int]]:
        """(place, tokens of the sequence, slot) of snapshots of earlier steps that rows may reach in this one first."""
        assert self._tracking is not None
        pending, kept = self._pending[rows], list[tuple[int, int, int]]()
        for place in np.flatnonzero((prefix_lens < pending) & (pending <= ends)).tolist():
            at = int(pending[place])
            page = int(pages[place, at // self._tracking.page_size - 1])
            if slot := self._snapshots.find(page):
                # Made the youngest before `_take`, which else might drop what this step writes.
                self._snapshots.keep(page, slot)
                kept.append((place, at, slot))
        return kept

    def _due(
        self, rows: Ints, prefix_lens: Ints, ends: Ints, decoding: Bools, tracking: Tracking
    ) -> list[tuple[int, int, bool]]:
        """(place, tokens of the sequence, whether in its prompt), ascending, of the snapshots due from this step on.

        `ends`: the most tokens that each row may have after the step. Due at: (1) the last page boundary of a prompt,
        so an identical prompt resumes there; (2) the page boundary where a prompt diverges from the cached ones, so
        later prompts with that prefix resume there, a shared system prompt for instance (SGLang's branching points);
        (3) every `interval` tokens while decoding, from the first step on that may come so far, unless the row may
        still be before the one before that.
        """
        marks = self._marks[rows]
        in_prompt = (prefix_lens[:, None] < marks) & (marks <= ends[:, None])
        passed = np.maximum(self._most[rows], marks[:, 1])
        following = (passed // tracking.interval + 1) * tracking.interval
        on_the_way = decoding & (following <= ends) & (self._pending[rows] <= prefix_lens)
        # Columns ascend, since each row has branch < end of prompt < decoded tokens; 0 marks "not due".
        at = np.column_stack((np.where(in_prompt, marks, 0), np.where(on_the_way, following, 0)))
        places, kinds = np.nonzero(at)
        return list(zip(places.tolist(), at[places, kinds].tolist(), (kinds < 2).tolist(), strict=True))

    def _slot_for(self, turns: deque[int] | None, taken: list[int]) -> int:
        """A slot for one more snapshot; 0 when there is none.

        A decoding request (`turns`) that has `buffers` snapshots reuses the slot of its oldest, unless that one is
        shared. `taken`: slots already used in this step, since one slot cannot take two states in one step.
        """
        assert self._tracking is not None
        if turns is not None and len(turns) >= self._tracking.buffers:
            own = self._snapshots.drop_own(turns.popleft())
            if own:
                return own
        # Snapshots are ordered by use: if the oldest was taken in this step, so was every other.
        if not self._free and next(iter(self._snapshots.slots), 0) in (0, *taken):
            return 0
        return self._take()

    def _take(self) -> int:
        return self._free.pop() if self._free else self._snapshots.drop_oldest()

    def slots_for(self, pages: int) -> int:
        """See `Portable`: the state at the end of the last page."""
        return 1

    def leaves(self, pages: Ints) -> Ints | None:
        """See `Portable`: the snapshot at the end of the last page."""
        slot = self._snapshots.find(int(pages[-1]))
        return np.array([slot]) if slot else None

    def resumes(self, row: int, pages: Ints) -> Ints:
        """See `Portable`: the row begins with zeros, which are replaced before its first step."""
        check("state_slot_conservation", self._fresh[row][1] == 0, row=row)
        return np.array([self._slot_of[row]])

    def released(self, row: int) -> None:
        """Free the slot of `row`. Raises InvariantViolation if it has none, as on a second release.

        The row's snapshots stay with their pages, until `freed` names those.
        """
        slot = int(self._slot_of[row])
        check("state_slot_double_free", slot > 0, row=row)
        self._slot_of[row] = 0
        self._marks[row] = self._pending[row] = self._most[row] = 0
        self._turns[row].clear()
        self._fresh.pop(row, None)
        self._free.append(slot)

    def replaced(self, pages: Ints, originals: Ints) -> None:
        """Move the snapshot of each duplicate to its original, if that has none: same prefix, same state at its end."""
        for page, original in zip(pages.tolist(), originals.tolist(), strict=True):
            if not self._snapshots.find(original) and (slot := self._snapshots.drop(page)):
                self._snapshots.keep(original, slot)
        self._snapshots.share(originals.tolist())

    def freed(self, pages: Ints) -> None:
        """Drop the snapshots of `pages`; their slots become free."""
        self._free += [slot for page in pages.tolist() if (slot := self._snapshots.drop(page))]

    def stats(self) -> tuple[PoolStats, ...]:
        """Slots held by running requests, and slots that hold snapshots."""
        return (PoolStats(NAME, self.size, self.size - self.available, len(self._snapshots)),)

    def check_integrity(self) -> None:
        """Recompute the partition into free, held and kept slots; raises InvariantViolation naming what is off."""
        held = self._slot_of[self._slot_of > 0].tolist()
        check("row_padding_reserved", self._slot_of[0] == 0, slot=int(self._slot_of[0]))
        kept = list(self._snapshots.slots)
        every, facts = sorted([*self._free, *held, *kept]), {"free": len(self._free), "held": len(held)}
        check("state_slot_conservation", every == list(range(1, self.size + 1)), kept=len(kept), **facts)
