"""Mutants of the page: what it costs, what it shows, and how it is drawn."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

DOOR, FEED, BROWSER = (f"tests/page/test_{name}.py::" for name in ("door", "feed", "browser"))

SHOWING: tuple[Mutant, ...] = (
    Mutant(
        "lanes-swapped-in-the-feed",
        "the lane of the device holds what the device did",
        "service/page/timeline.py",
        "_flat(work, begin, span, kinds=True)",
        "_flat(steps, begin, span, kinds=True)",
        FEED + "test_lanes_are_those_of_the_device",
    ),
    Mutant(
        "page-stands-still",
        "an event is of now",
        "service/page/feed.py",
        "if time.monotonic() - self._made_at > PERIOD_SECONDS / 2:",
        "if not self._event:",
        FEED + "test_an_event_agrees_with_metrics_and_names_streams_but_no_text",
    ),
    Mutant(
        "pages-without-bound",
        "at most so many pages are open",
        "service/page/feed.py",
        "self._watchers == MAX_WATCHERS or ",
        "",
        DOOR + "test_watchers_are_bounded_and_scrapes_go_on_beside_them",
    ),
    Mutant(
        "recording-outlives-the-last-page",
        "nothing is recorded while nobody looks",
        "service/page/feed.py",
        "                self._lanes.stop()\n",
        "",
        DOOR + "test_closing_ends_the_events_and_recording_ends_with_the_last_watcher",
    ),
    Mutant(
        "stalled-page-kept",
        "a page that does not read is cut",
        "service/metrics/http.py",
        "            self.connection.setsockopt(SOL_SOCKET, SO_SNDBUF, EVENTS_BUFFER_BYTES)\n",
        "            self.connection.settimeout(None)\n",
        DOOR + "test_a_reader_that_stalls_is_cut_and_holds_up_nobody",
    ),
    Mutant(
        "trace-ends-the-pages-recording",
        "a recording ends with the last who started it",
        "core/lanes.py",
        "            if not self._users:\n",
        "            if self._users >= 0:\n",
        FEED + "test_a_trace_and_a_page_record_side_by_side",
    ),
    Mutant(
        "lanes-swapped-on-the-canvas",
        "every slice is drawn in its lane",
        "service/page/page.js",
        "scheduler: [0, 34], device: [40, 46]",
        "scheduler: [40, 46], device: [0, 34]",
        BROWSER + "test_the_page_shows_what_metrics_say_and_the_lanes_as_they_were",
    ),
    Mutant(
        "idle-gaps-painted-over",
        "what no step covers is seen as idle",
        "service/page/page.js",
        '  fill(pen, "gap", 0, width, top, tall);\n',
        '  fill(pen, "device", 0, width, top, tall);\n',
        BROWSER + "test_gaps_and_names_are_shown_as_they_came",
    ),
    Mutant(
        "names-as-markup",
        "what came over the wire is text, never markup",
        "service/page/page.js",
        "place.textContent = text;",
        "place.innerHTML = text;",
        BROWSER + "test_gaps_and_names_are_shown_as_they_came",
    ),
)
