"""Which recurrent state slots are free and which request holds which. Host side of the "mamba" pool."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from core.invariants import check
from core.memory.state_snapshots import StateSnapshots, Tracking
from core.types.arrays import Ints
from core.types.stats import PoolStats

NAME = "mamba"
NOTHING: Ints = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Tracked:
    """States to keep in the coming step: of its row at `places[i]`, after `tokens[i]` of its tokens, in `slots[i]`."""

    places: Ints = field(default_factory=NOTHING.copy)
    """int64[n], ascending: indices into the rows of the batch."""
    tokens: Ints = field(default_factory=NOTHING.copy)
    """int64[n], 1 to the tokens that the step computes of that row."""
    slots: Ints = field(default_factory=NOTHING.copy)
    """int64[n], no duplicates."""


@dataclass(frozen=True, slots=True)
class StateWrites:
    """Requests that got a slot since the last step: `rows[i]` now maps to `slots[i]`, which must first become a copy of
    slot `sources[i]`, or clear where that is 0. All sources are read before any slot is written.
    """

    rows: Ints
    slots: Ints
    sources: Ints
    tracked: Tracked = field(default_factory=Tracked)


class StateSlots:
    """Slots 1..size, one per running request, the others free or kept for pages; slot 0 is padding and never leaves
    (law 6). A `Companion`.

    The number of slots has nothing to do with the number of request rows: a request is admitted when both have room.
    A state cannot be rolled back nor rebuilt from pages, so a cached prefix is worth as much as the last of its pages
    that a snapshot is kept for. A snapshot belongs to its page from the step that writes it (the one FIFO orders
    readers behind it), hence nothing of it is freed with the row. Nobody needs one longer than admission takes: all
    of them give way to running requests, the least recently used first.
    """

    name = NAME

    def __init__(self, size: int, num_rows: int, tracking: Tracking | None = None) -> None:
        check("state_slot_conservation", size >= 1, size=size)
        self.size = size
        self._tracking = tracking
        self._snapshots = StateSnapshots()
        self._boundary: Ints = np.zeros(num_rows, np.int64)
        """By request row: the last page boundary that leaves a token of the prompt to compute."""
        self._turns: list[deque[int]] = [deque() for _ in range(num_rows)]
        """By request row: pages whose snapshots it took while decoding, the oldest first."""
        self._slot_of: Ints = np.zeros(num_rows, np.int64)
        """By request row, 0 for none. Invariant: non-zero entries are distinct and disjoint from `_free`."""
        self._free = list(range(size, 0, -1))
        self._fresh: dict[int, tuple[int, int]] = {}
        """Row -> slot and its source, of requests whose first step is not planned yet."""

    @property
    def available(self) -> int:
        """Slots that could be handed out now."""
        return len(self._free) + len(self._snapshots)

    def slot_of(self, row: int) -> int:
        """The slot of the request in `row`; 0 when it has none."""
        return int(self._slot_of[row])

    def resumable(self, pages: Ints) -> int:
        """See `Companion`."""
        return self._snapshots.longest(pages)

    def fits_alone(self, total_tokens: int, encoder_tokens: int = 0) -> bool:
        """A state is of one size however long the sequence."""
        return True

    def can_admit(self, tokens: int, cached: Ints, encoder_tokens: int = 0) -> bool:
        """See `Companion`. The last snapshot of all serves even when it is the one behind `cached`: it is moved."""
        return self.available > 0

    def admitted(self, row: int, tokens: int, cached: Ints, encoder_tokens: int = 0) -> None:
        """See `Companion`."""
        check("row_padding_reserved", row > 0, row=row)
        check("state_slot_conservation", self._slot_of[row] == 0, row=row, held=int(self._slot_of[row]))
        check("state_slot_conservation", self.available > 0, row=row)
        source = 0
        if len(cached):
            page = int(cached[-1])
            source = self._snapshots.find(page)
            check("state_snapshot_present", source > 0, row=row, page=page)
            self._snapshots.keep(page, source)
        slot = self._take()
        self._slot_of[row] = slot
        self._fresh[row] = (slot, source)
        if self._tracking is not None:
            self._boundary[row] = (tokens - 1) // self._tracking.page_size * self._tracking.page_size

    def planned(self, rows: Ints, prefix_lens: Ints, extend_lens: Ints, pages: Ints) -> StateWrites | None:
        """The slots given out since the last step, for every one of which the mapping changes and the state is old, and
        the states to keep.
        """
        tracked = self._track(rows, prefix_lens, extend_lens, pages)
        if not self._fresh and not len(tracked.places):
            return None
        fresh, self._fresh = self._fresh, {}
        slots, sources = np.array(list(fresh.values()), np.int64).reshape(-1, 2).T
        return StateWrites(np.array(list(fresh.keys()), np.int64), slots, sources, tracked)

    def _track(self, rows: Ints, prefix_lens: Ints, extend_lens: Ints, pages: Ints) -> Tracked:
        """Slots for the boundaries that this step reaches. Where none can be had, nothing is kept: it only saves."""
        tracking = self._tracking
        if tracking is None:
            return Tracked()
        ends, prompts = prefix_lens + extend_lens, self._boundary[rows]
        in_prompt = (prefix_lens < prompts) & (prompts <= ends)
        on_the_way = (extend_lens == 1) & (ends > prompts) & (ends % tracking.interval == 0)
        at = np.where(in_prompt, prompts, np.where(on_the_way, ends, 0))
        found: dict[int, int] = {}
        for place in np.flatnonzero(at).tolist():
            page = int(pages[place, at[place] // tracking.page_size - 1])
            if self._snapshots.find(page):
                continue
            turns = None if in_prompt[place] else self._turns[rows[place]]
            slot = self._slot_for(turns, found)
            if slot:
                found[place] = slot
                self._snapshots.keep(page, slot)
                if turns is not None:
                    turns.append(page)
        places = np.array(list(found), np.int64)
        return Tracked(places, (at - prefix_lens)[places], np.array(list(found.values()), np.int64))

    def _slot_for(self, turns: deque[int] | None, found: dict[int, int]) -> int:
        """A slot for one more snapshot: the request's own oldest when its turns are over; 0 when there is none.

        `found`: place -> slot of this step. One slot cannot take two states in one step.
        """
        assert self._tracking is not None
        if turns is not None and len(turns) >= self._tracking.buffers:
            own = self._snapshots.drop(turns.popleft())
            if own:
                return own
        if not self._free and next(iter(self._snapshots.slots), 0) in (0, *found.values()):
            return 0
        return self._take()

    def _take(self) -> int:
        return self._free.pop() if self._free else self._snapshots.drop_oldest()

    def released(self, row: int) -> None:
        """See `Companion`. A second release, or one of a row without a slot, is an invariant violation.

        The row's snapshots stay with their pages, which the cache takes or `freed` names.
        """
        slot = int(self._slot_of[row])
        check("state_slot_double_free", slot > 0, row=row)
        self._slot_of[row] = 0
        self._boundary[row] = 0
        self._turns[row].clear()
        self._fresh.pop(row, None)
        self._free.append(slot)

    def freed(self, pages: Ints) -> None:
        """See `Companion`: their snapshots become free slots."""
        self._free += [slot for page in pages.tolist() if (slot := self._snapshots.drop(page))]

    def stats(self) -> tuple[PoolStats, ...]:
        """Slots held by running requests, and kept for pages."""
        return (PoolStats(NAME, self.size, self.size - self.available, len(self._snapshots)),)

    def check_integrity(self) -> None:
        """Recompute the partition into free, held and kept slots; raises InvariantViolation naming what is off."""
        held = self._slot_of[self._slot_of > 0].tolist()
        check("row_padding_reserved", self._slot_of[0] == 0, slot=int(self._slot_of[0]))
        kept = list(self._snapshots.slots)
        every, facts = sorted([*self._free, *held, *kept]), {"free": len(self._free), "held": len(held)}
        check("state_slot_conservation", every == list(range(1, self.size + 1)), kept=len(kept), **facts)
