"""Mutants of the window pool: who may have a page, who still needs it, and what is charged."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

PAGES = "core/memory/window/window_pages.py"
BOUNDS = "core/memory/window/window_bounds.py"
TEST = "tests/memory/test_window_pages.py::"
REACHED = TEST + "test_the_bounds_are_reached_and_never_passed"

WINDOWS: tuple[Mutant, ...] = (
    Mutant(
        "window-page-freed-early",
        "a page is passed when no query to come reaches its last key",
        BOUNDS,
        "(lens - self.window + 1).clip(0)",
        "(lens - self.window + 2).clip(0)",
        REACHED,
    ),
    Mutant(
        "window-page-freed-under-a-reader",
        "a page that one row passed stays while another needs it",
        PAGES,
        "            if self._users[page] == 0:\n                self._idle[page] = None",
        "            self._idle[page] = None",
        TEST + "test_what_one_row_passed_stays_while_another_needs_it",
        dies_by="invariant",
    ),
    Mutant(
        "shared-window-has-no-user",
        "a row that starts behind a cached prefix uses the pages of its window",
        PAGES,
        "        self._users[needed] += 1\n",
        "",
        TEST + "test_what_one_row_passed_stays_while_another_needs_it",
        dies_by="invariant",
    ),
    Mutant(
        "resumes-behind-a-broken-window",
        "a prefix is resumed where its whole last window is there",
        PAGES,
        "np.flatnonzero(missing < firsts)",
        "np.flatnonzero(missing < places)",
        TEST + "test_a_prefix_is_resumed_where_its_last_window_is_whole",
    ),
    Mutant(
        "shared-window-not-charged",
        "a shared page is charged from the moment it is shared",
        PAGES,
        "return self._holds(own, shared + int((guests[needed] == 0).sum()))",
        "return self._holds(own, shared)",
        TEST + "test_a_shared_window_is_charged_once_from_the_moment_it_is_shared",
    ),
    Mutant(
        "window-bound-too-low",
        "a row's window may lie across one page more than it fills",
        BOUNDS,
        "(self.window + self.page_size - 3) // self.page_size + 2",
        "(self.window + self.page_size - 3) // self.page_size + 1",
        REACHED,
    ),
    Mutant(
        "chunk-not-charged",
        "a step's chunk is held beside the windows",
        BOUNDS,
        "return (self.chunk - 1) // self.page_size",
        "return 0",
        REACHED,
    ),
    Mutant(
        "growth-not-asked-for",
        "a decoding row gets a KV page only where the other pools have room for it too",
        "core/memory/request_memory.py",
        "if all(c.can_grow(rows) for c in self._growing) else None",
        "if True else None",
        TEST + "test_a_row_gets_no_page_where_another_pool_has_none_for_it",
    ),
    Mutant(
        "lost-window-never-comes-back",
        "a cached prefix whose window went is whole again once it was computed again",
        PAGES,
        "revived = (self._window_of[pages] > 0) & (self._window_of[originals] == 0)",
        "revived = pages < 0",
        TEST + "test_a_prefix_that_lost_its_window_is_whole_again_when_computed_again",
    ),
    Mutant(
        "device-keeps-old-translations",
        "the device translates as the host does",
        PAGES,
        "self._window_of[page] = self._changed[page] = 0",
        "self._window_of[page] = 0",
        TEST + "test_the_device_translates_as_the_host_does_and_padding_to_padding",
    ),
    Mutant(
        "windowed-layers-read-kv-slots",
        "slots of the ordinary pool are translated before the window pool is read",
        "core/attention/span_plan.py",
        "batch.pool_slots(slots).view(-1)",
        "slots.view(-1)",
        "tests/attention/test_span_plan.py::test_slots_are_translated_to_the_pool_of_the_batch_and_padding_stays_padding",
    ),
)
