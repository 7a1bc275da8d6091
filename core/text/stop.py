"""Stop strings, found wherever the borders between pieces of text fall.

All stop strings of a request form one automaton (Aho and Corasick 1975): its state is the longest end of the text that
begins some stop string. That is all a matcher must remember, and exactly what it must hold back. Each character costs
one step on average, however many stop strings there are.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from typing import Final

_CACHED_AUTOMATA: Final = 256


class StopMatcher:
    """Watches one output. `feed` pieces in order, until a match or until `finish`.

    The match that is complete first wins, whatever the pieces are: the output ends at the first character that
    completes any stop string. Of several complete at that character the longest wins, the one that starts first.
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
        """Text that can be shown now, and the stop string that was completed, if any.

        On a match that text ends before the stop string, or with it when it is to be included; what follows is dropped.
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
    """Immutable after construction, shared by all requests with the same stop strings. State 0 is the empty string."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._edges: list[dict[str, int]] = [{}]
        self._fallbacks = [0]
        self._matches: list[str | None] = [None]
        self.depths = [0]
        """Length of each state's string: how much text it stands for."""
        for stop in stops:
            self._insert(stop)
        self._link()
        self._starts = frozenset(self._edges[0])

    def scan(self, state: int, text: str) -> tuple[int, int, str | None]:
        """Read `text` up to the first completed stop string: characters read, the state there, the string or None."""
        edges, fallbacks, matches, starts = self._edges, self._fallbacks, self._matches, self._starts
        for place, character in enumerate(text):
            if state == 0 and character not in starts:
                continue
            while (following := edges[state].get(character)) is None and state:
                state = fallbacks[state]
            state = following or 0
            if (match := matches[state]) is not None:
                return place + 1, state, match
        return len(text), state, None

    def _insert(self, stop: str) -> None:
        state = 0
        for character in stop:
            following = self._edges[state].get(character)
            if following is None:
                following = len(self._edges)
                self._edges[state][character] = following
                self._edges.append({})
                self._fallbacks.append(0)
                self._matches.append(None)
                self.depths.append(self.depths[state] + 1)
            state = following
        self._matches[state] = stop

    def _link(self) -> None:
        """Breadth first: each state falls back to the longest proper end of its string that is a state too."""
        queue = deque(self._edges[0].values())
        while queue:
            state = queue.popleft()
            fallback = self._fallbacks[state]
            # The state's own string is longer than any that ends with it, so it wins where both are stop strings.
            if self._matches[state] is None:
                self._matches[state] = self._matches[fallback]
            for character, following in self._edges[state].items():
                self._fallbacks[following] = self._step(fallback, character)
                queue.append(following)

    def _step(self, state: int, character: str) -> int:
        while character not in self._edges[state] and state:
            state = self._fallbacks[state]
        return self._edges[state].get(character, 0)


@lru_cache(maxsize=_CACHED_AUTOMATA)
def _automaton(stops: tuple[str, ...]) -> _Automaton:
    """Outputs of one request, and most requests of one client, have the same stop strings."""
    return _Automaton(stops)
