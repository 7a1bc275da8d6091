"""Stop strings, found wherever the borders between pieces of text fall.

All stop strings of a request form one automaton (Aho and Corasick 1975): its state is the longest end of the text that
begins some stop string. A matcher remembers only that, and holds back exactly that text. Each character costs one step
on average, however many stop strings there are.

A client chooses how large it is (16 strings of 256 characters), so it is kept small and made late: 4,100 states take
40 KB in arrays, where a dictionary each took 1 MB, and the half that costs time, where a state falls back to, is found
level by level as an output gets there. Making one takes 0.1 ms.
"""

from __future__ import annotations

from array import array
from typing import Final
from weakref import WeakValueDictionary

_NO_MATCH: Final = -1
_GAP: Final = "\0"


class StopMatcher:
    """Watches one output. `feed` pieces in order, until a match or until `finish`.

    The output ends at the first character that completes any stop string, however the text is cut into pieces. If that
    character completes several stop strings, the longest wins, which is the one that starts first.
    """

    def __init__(self, stops: tuple[str, ...], include_stop: bool) -> None:
        """`stops`: non-empty strings. `include_stop`: whether the matched one is part of the text."""
        assert all(stops), "an empty stop string matches everywhere"
        self._automaton = _automaton(stops) if stops else None
        self._include_stop = include_stop
        self._state = 0
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the output; no more text comes out after it."""

    def feed(self, text: str) -> tuple[str, str | None]:
        """(text that can be shown now, the stop string that was completed or None).

        On a match the text ends before the stop string, or after it with `include_stop`; what follows is dropped.
        """
        if self.matched is not None:
            return "", self.matched
        if self._automaton is None:
            return text, None
        end, self._state, self.matched = self._automaton.scan(self._state, text)
        seen = self._held + text[:end]
        if self.matched is None:
            # The state's string is an end of `seen`, and may grow into a stop string.
            shown = len(seen) - self._automaton.depths[self._state]
            self._held = seen[shown:]
            return seen[:shown], None
        self._held = ""
        return seen if self._include_stop else seen[: len(seen) - len(self.matched)], self.matched

    def finish(self) -> str:
        """The text held back because it could have become a stop string; the output ended before it did."""
        held, self._held = self._held, ""
        return held


class _Automaton:
    """Shared by all requests with the same stop strings; on one thread, because a scan completes it as it goes.

    State 0 is the empty string, with a gap behind. A stop string walks along the states that are there and adds its
    rest as a run of new ones, so the state behind `s` is almost always `s + 1`. A gap, one unused state of depth 0,
    ends each run.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self.depths = array("H", [0, 0])
        """Of each state: length of its string, which a text that ends there has to hold back."""
        self._labels = _GAP * 2
        """The last character of each state's string."""
        self._forks: dict[tuple[int, str], int] = {}
        """Where a run begins: at the state and character that no state stood for."""
        self._runs: list[tuple[int, int, int, int]] = []
        """Of each run: the state it begins behind, its first state, the depth of that, and the depth it ends before."""
        ends = [self._insert(stop) for stop in stops]
        self._matches = array("b", [_NO_MATCH]) * len(self.depths)
        """Of each state: which stop string ends there. Its own is longer than any that its string ends with."""
        for number, end in enumerate(ends):
            self._matches[end] = number
        self._fallbacks = array("H", [0]) * len(self.depths)
        """The longest proper end of each state's string that is a state too, known down to `_linked`."""
        self._linked = 1
        self._starts = {character: state for (parent, character), state in self._forks.items() if parent == 0}

    def scan(self, state: int, text: str) -> tuple[int, int, str | None]:
        """Read `text` up to the first completed stop string: characters read, the state there, the string or None."""
        starts, depths, labels, matches = self._starts, self.depths, self._labels, self._matches
        for place, character in enumerate(text):
            if state == 0:
                state = starts.get(character, 0)
                if state == 0:
                    continue
            elif labels[state + 1] == character and depths[state + 1] == depths[state] + 1:
                state += 1
            else:
                state = self._following(state, character)
            if depths[state] > self._linked:
                self._link()
            if (match := matches[state]) != _NO_MATCH:
                return place + 1, state, self._stops[match]
        return len(text), state, None

    def _following(self, state: int, character: str) -> int:
        """The state behind `character`, from a state that is linked."""
        depths, labels, forks, fallbacks = self.depths, self._labels, self._forks, self._fallbacks
        while True:
            if labels[state + 1] == character and depths[state + 1] == depths[state] + 1:
                return state + 1
            found = forks.get((state, character))
            if found is not None:
                return found
            if state == 0:
                return 0
            state = fallbacks[state]

    def _insert(self, stop: str) -> int:
        """Add the states that `stop` lacks; the one it ends in."""
        state = 0
        for place, character in enumerate(stop):
            if self.depths[state + 1] == place + 1 and self._labels[state + 1] == character:
                state += 1
            elif (state, character) in self._forks:
                state = self._forks[state, character]
            else:
                return self._add_run(state, stop[place:])
        return state

    def _add_run(self, parent: int, rest: str) -> int:
        """States for `rest` behind `parent`; the last of them."""
        first, depth = len(self.depths), self.depths[parent] + 1
        self._forks[parent, rest[0]] = first
        self._runs.append((parent, first, depth, depth + len(rest)))
        self.depths.extend(range(depth, depth + len(rest)))
        self.depths.append(0)
        self._labels += rest + _GAP
        return first + len(rest) - 1

    def _link(self) -> None:
        """Find where the states of one more level fall back to: at most one for each stop string."""
        level = self._linked = self._linked + 1
        for parent, first, depth, end in self._runs:
            if not depth <= level < end:
                continue
            state = first + level - depth
            before = parent if state == first else state - 1
            fallback = self._fallbacks[state] = self._following(self._fallbacks[before], self._labels[state])
            if self._matches[state] == _NO_MATCH:
                self._matches[state] = self._matches[fallback]


_shared: WeakValueDictionary[tuple[str, ...], _Automaton] = WeakValueDictionary()


def _automaton(stops: tuple[str, ...]) -> _Automaton:
    """Outputs of one request, and most requests of one client, have the same stop strings; kept while one has them."""
    found = _shared.get(stops)
    if found is None:
        found = _shared[stops] = _Automaton(stops)
    return found
