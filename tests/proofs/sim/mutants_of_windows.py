"""Mutants of sliding windows: which window page stands for which KV page, and how long."""

from __future__ import annotations

from typing import Any

import numpy as np

from core.memory.companion import AdmissionFacts
from core.memory.window.window_bounds import WindowBounds
from core.memory.window.window_pages import WindowPages, WindowWrites
from core.types.arrays import Ints
from tests.proofs.sim.mutants import Patch, mutant, put


@mutant("window_owner", "window_read", "invariant:window_page_present")
def windows_are_a_token_short(patch: Patch) -> None:
    """What a query sees first is passed a token too early."""
    put(patch, WindowBounds, "first_places", lambda old, self, lens: old(self, lens + 1))


@mutant("window_owner", "invariant:window_page_conservation")
def window_pages_outlive_their_pages(patch: Patch) -> None:
    """A KV page that changed hands still has the window page of its former owner."""

    def freed(old: Any, self: WindowPages, pages: Ints) -> None:
        old(self, pages[:-1])

    put(patch, WindowPages, "freed", freed)


@mutant("window_owner")
def window_pages_are_freed_with_their_row(patch: Patch) -> None:
    """Others that share the prefix read them still."""

    def released(old: Any, self: WindowPages, row: int) -> None:
        self._free += [int(self._window_of[page]) for page in self._uses[row]]
        old(self, row)

    put(patch, WindowPages, "released", released)


@mutant("window_owner", "window_read")
def any_prefix_is_resumed(patch: Patch) -> None:
    """A cached prefix is taken though what its last window held is gone."""

    def admitted(old: Any, self: WindowPages, row: int, facts: AdmissionFacts) -> None:
        cached = facts.cached
        needed = self._needed(cached)
        missing = needed[self._window_of[needed] == 0]
        if not len(missing):
            old(self, row, facts)
            return
        self._behind[row] = self._end[row] = self._first[row] = len(cached)
        self._own[row] = self.bounds.pages_for(facts.tokens) - len(cached)

    patch.setattr(WindowPages, "resumable", lambda self, pages: len(pages))
    patch.setattr("core.memory.window.window_pages.check", lambda *args, **facts: None)
    put(patch, WindowPages, "admitted", admitted)


@mutant("window_kept", "window_read")
def replaced_window_pages_go_to_a_neighbour(patch: Patch) -> None:
    """Two lists that belong together are cut apart."""
    put(patch, WindowPages, "replaced", lambda old, self, pages, originals: old(self, pages, originals[::-1]))


@mutant("window_table")
def ended_entries_are_not_told(patch: Patch) -> None:
    """The device still translates what stands for nothing: a late read would find another's keys, not padding."""

    def writes(old: Any, self: WindowPages) -> WindowWrites | None:
        told = old(self)
        return None if told is None else WindowWrites(told.pages[told.windows > 0], told.windows[told.windows > 0])

    put(patch, WindowPages, "_writes", writes)


@mutant("window_read")
def new_pages_share_a_window_page(patch: Patch) -> None:
    """All that a step begins are told the first of them."""

    def planned(old: Any, self: WindowPages, *args: Any) -> WindowWrites | None:
        told = old(self, *args)
        if told is None:
            return None
        first = told.windows[told.windows > 0][:1].sum()
        return WindowWrites(told.pages, np.where(told.windows, first, 0))

    put(patch, WindowPages, "planned", planned)


@mutant("crash:RuntimeError", "crash:StopIteration")
def rooms_are_not_charged(patch: Patch) -> None:
    """Whoever comes is admitted, and a step that was promised finds no window page."""
    patch.setattr(WindowPages, "can_grow", lambda self, rows: True)
    patch.setattr(WindowPages, "can_admit", lambda self, facts: True)


@mutant("window_owner", "invariant:window_page_present", "window_read", drafts=True)
def windows_are_passed_by_the_most(patch: Patch) -> None:
    """A row is believed to have got all its drafts, and what it still sees is given up."""

    def planned(old: Any, self: WindowPages, rows: Ints, starts: Ints, lens: Ints, pages: Ints, ahead: Ints) -> Any:
        told = old(self, rows, starts, lens, pages, ahead)
        if ahead is not None:
            self._pass_all(rows, self.bounds.first_places(starts + lens + ahead) - self._first[rows])
        return told

    put(patch, WindowPages, "planned", planned)


@mutant("window_owner", "window_read", "invariant:window_page_present", drafts=True)
def windows_have_no_page_for_drafts(patch: Patch) -> None:
    """Pages begin by the fewest tokens that a row may get."""
    put(patch, WindowPages, "planned", lambda old, self, *args: old(self, *args[:4]))
