"""Where llguidance works on the rows of one step: on the calling thread, or on threads of its own.

Its threads work without the GIL, but giving a step's rows to them and being woken when they are done are two waits for
a core, twice a step: 0.4 to 1 ms where two cores are busy, while the masks of 64 rows of a JSON schema at 704 tokens
take 0.2 ms. A call for one row keeps the GIL (1.9.1), so many calls take no longer than their work. Hence rows of
grammars that have proved quick are done here while the step's budget lasts, and only the rest is handed over.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from llguidance import LLExecutor, LLMatcher

from core.machine import usable_cpus
from core.types.grammar import Words

MAX_THREADS = 8
"""Most threads for the masks of one step."""
BUDGET_SECONDS = 5e-4
"""Spent on the calling thread for the rows of one step, with the GIL held: as long as the switch interval
of a process that runs only the engine, so its event loop waits no longer."""
SLOW_SECONDS = 1e-3
"""A grammar with a row that takes longer is left to the threads until it has proved quick again."""


@dataclass(slots=True)
class Pace:
    """Whether one grammar is quick; shared by its matchers. At first it is not: its first mask delays no other row."""

    is_quick: bool = False


@dataclass(frozen=True, slots=True)
class PacedRow:
    """One row's matcher."""

    inner: LLMatcher
    pace: Pace


class MaskPool:
    """Shared by all grammars of an engine, used by one thread at a time. The choice of thread changes no answer."""

    def __init__(self) -> None:
        self.handed_over = 0
        """Calls that went to the threads."""
        self._executor = LLExecutor(num_threads=max(1, min(MAX_THREADS, usable_cpus() // 2)))

    def accept(self, rows: Sequence[PacedRow], tokens: Sequence[int]) -> list[bool]:
        """`consume_token` of `tokens[i]` by `rows[i]`: quick rows here while the budget lasts, others on threads."""
        accepted = [False] * len(rows)
        left, now = [], time.perf_counter()
        end = now + BUDGET_SECONDS
        for place, row in enumerate(rows):
            if now < end and row.pace.is_quick:
                accepted[place] = row.inner.consume_token(tokens[place])
                now = _timed(row.pace, now)
            else:
                left.append(place)
        if left:
            self.handed_over += 1
            found = self._executor.consume_token_par([(rows[place].inner, tokens[place]) for place in left])
            for place, fine in zip(left, found, strict=True):
                accepted[place] = fine
        return accepted

    def fill(self, rows: Sequence[PacedRow], masks: Words) -> None:
        """Write the mask of each row into `masks`, contiguous int32[G, W]; W must be the library's own mask length."""
        assert masks.dtype == np.int32 and masks.flags["C_CONTIGUOUS"], (masks.dtype, masks.strides)
        base, size = masks.ctypes.data, masks.strides[0]
        left, now = [], time.perf_counter()
        end = now + BUDGET_SECONDS
        for place, row in enumerate(rows):
            if now < end and row.pace.is_quick:
                row.inner.unsafe_compute_mask_ptr(base + place * size, size)
                now = _timed(row.pace, now)
            else:
                left.append(place)
        if left:
            self._hand_over(rows, left, base, size)

    def _hand_over(self, rows: Sequence[PacedRow], left: list[int], base: int, size: int) -> None:
        self.handed_over += 1
        began = time.perf_counter()
        self._executor.unsafe_compute_mask_ptr([(rows[place].inner, place) for place in left], base, size, len(rows))
        # Together they took no longer than one slow row, or than slow rows would have here.
        if time.perf_counter() - began < SLOW_SECONDS * max(1, len(left) // 8):
            for place in left:
                rows[place].pace.is_quick = True


def _timed(pace: Pace, began: float) -> float:
    """The time now. A row that took longer than `SLOW_SECONDS` marks its grammar as not quick."""
    now = time.perf_counter()
    if now - began > SLOW_SECONDS:
        pace.is_quick = False
    return now
