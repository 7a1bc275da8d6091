"""Matcher work of a step: quick rows are asked in common calls, the others one at a time and within their budget.

One library call for all rows is cheapest, but does not tell how long each row took. So the wall time of a call only
makes its rows suspected: a stalled host makes every call slow, and threads of a library share their work. A suspected
row is asked alone. All of its work is then on this thread, and the thread's processor time is charged to the row. It
returns to the common calls with the first step in which it took no more than its budget allows for free.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from core.batch.grammar_batch import GrammarSeed, GrammarStatus
from core.sampling.grammar.budget import RowBudget, SharedBudget, free_seconds
from core.types.grammar import Grammar, Matcher, Words

log = logging.getLogger(__name__)

TOGETHER = 16
"""Rows in one call: a slow row that is not suspected yet delays at most this many."""
SUSPICIOUS_SECONDS = 2e-3
"""Wall time of one such call, in seconds, above which its rows are suspected."""
REST = 64
"""Steps in which no draft of a row is looked at, after looking at its drafts took too long."""


@dataclass(slots=True)
class Follower:
    """The matcher of one owner of a row."""

    generation: int
    grammar: Grammar
    matcher: Matcher
    budget: RowBudget
    suspected: bool = False
    accepting: float = 0.0
    """Processor time of accepting its newest tokens, in seconds; charged together with the next mask."""
    rests: int = 0
    """Steps for which its drafts are not looked at."""
    failed: GrammarStatus | None = None
    """The status that its request ends with, once that is known."""

    def is_over(self) -> bool:
        """Whether no text can follow. A library may make a mask to find out, so the time of a suspected row counts."""
        if not self.suspected:
            return self.matcher.is_terminated
        began = time.thread_time()
        over = self.matcher.is_terminated
        self.accepting += time.thread_time() - began
        return over


class GrammarWork:
    """Accepts tokens and fills masks for followers. Used by one thread. `clock`: wall time in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._budget: SharedBudget | None = None

    def seated(self, seed: GrammarSeed) -> Follower:
        """A follower that has accepted the outputs its request has already; each of them is charged like a step."""
        if self._budget is None:
            self._budget = SharedBudget(seed.grammar.words, self._clock)
        matcher = seed.grammar.matcher()
        follower = Follower(seed.generation, seed.grammar, matcher, RowBudget(seed.grammar.words))
        for token in seed.outputs.tolist():
            began = time.thread_time()
            accepted = matcher.accept(token)
            self._charge(follower, time.thread_time() - began)
            if not accepted:
                give_up(follower)
            if follower.failed is not None:
                break
            follower.suspected = follower.budget.is_heavy
        return follower

    def accept(self, followers: Sequence[Follower], tokens: Sequence[int]) -> None:
        """Let `followers[i]` accept `tokens[i]`; one that cannot is marked as failed."""
        self._shared.refill()

        def ask(places: list[int]) -> None:
            chunk = [followers[place] for place in places]
            matchers = [each.matcher for each in chunk]
            accepted = chunk[0].grammar.accept_all(matchers, [tokens[place] for place in places])
            for follower, fine in zip(chunk, accepted, strict=True):
                if not fine:
                    give_up(follower)

        for place in self._together(followers, ask):
            follower = followers[place]
            began = time.thread_time()
            accepted = follower.matcher.accept(tokens[place])
            follower.accepting += time.thread_time() - began
            if not accepted:
                give_up(follower)

    def fill(self, followers: Sequence[Follower], words: Words) -> npt.NDArray[np.bool_]:
        """Write the masks of G followers into `words`, int32[G, W]; bool[G]: whether each allows a token at all."""
        some = np.zeros(len(followers), np.bool_)

        def ask(places: list[int]) -> None:
            first, end = places[0], places[-1] + 1
            is_run = end - first == len(places)
            # A run is filled in place, as a view; other places go through a copy, which is written back.
            part = words[first:end] if is_run else words[places]
            chunk = [followers[place].matcher for place in places]
            some[places] = followers[first].grammar.fill_all(chunk, part)
            if not is_run:
                words[places] = part

        for place in self._together(followers, ask):
            follower = followers[place]
            began = time.thread_time()
            some[place] = follower.matcher.fill(words[place])
            self._charge(follower, follower.accepting + time.thread_time() - began)
            follower.accepting = 0.0
            follower.suspected = follower.budget.is_heavy
        return some

    def look_ahead(self, follower: Follower, drafts: Sequence[int], words: Words) -> int:
        """Write the masks behind each of K drafts into `words`, int32[K + 1, W]; the first is there, the rest ones.

        Returns how many of the drafts may be verified: those with a mask behind them. They end before one that is not
        allowed, behind one that nothing may follow, and where the free seconds of a step are used up. What that costs
        beyond is charged to all rows together: the client has not asked for drafts.
        """
        if follower.rests:
            follower.rests -= 1
            return 0
        if follower.suspected or self._shared.left < 0 or not (drafts and _allows(words[0], drafts[0])):
            return 0
        began = time.thread_time()
        free, found, ahead = free_seconds(follower.grammar.words), 0, follower.matcher.fork()
        for place, draft in enumerate(drafts, 1):
            if not (_allows(words[place - 1], draft) and ahead.accept(draft)):
                break
            words[place] = 0
            if not ahead.fill(words[place]):
                words[place] = -1
                break
            found = place
            if time.thread_time() - began > free:
                follower.rests = REST
                break
        self._shared.spend(max(0.0, time.thread_time() - began - free))
        return found

    def _together(self, followers: Sequence[Follower], ask: Callable[[list[int]], None]) -> Iterator[int]:
        """Call `ask` for the quick rows, up to the first slow call; yield the places of rows to be asked alone."""
        together, alone = _parted(followers)
        for start in range(0, len(together), TOGETHER):
            places = together[start : start + TOGETHER]
            began = self._clock()
            ask(places)
            if self._clock() - began > SUSPICIOUS_SECONDS:
                for place in together[start:]:
                    followers[place].suspected = True
                alone += together[start + TOGETHER :]
                break
        if len(alone) > 1:
            # The row that has taken least comes first, in case there is no time for all.
            alone.sort(key=lambda place: -followers[place].budget.left)
        for place in alone:
            if self._may_work(followers[place]):
                yield place

    @property
    def _shared(self) -> SharedBudget:
        assert self._budget is not None, "a row is seated before it is asked"
        return self._budget

    def _may_work(self, follower: Follower) -> bool:
        """Whether `follower` may be asked. A heavy one fails where the time shared by all rows is used up."""
        if follower.budget.is_dear and self._shared.left < 0:
            follower.failed = GrammarStatus.CROWDED
        return follower.failed is None

    def _charge(self, follower: Follower, seconds: float) -> None:
        self._shared.spend(follower.budget.spend(seconds))
        if follower.budget.left < 0:
            follower.failed = follower.failed or GrammarStatus.TOO_COMPLEX


def _allows(words: Words, token: int) -> bool:
    """Whether `token` is allowed by a mask, int32[W]."""
    return bool(words[token >> 5] >> (token & 31) & 1)


def give_up(follower: Follower) -> None:
    """Mark `follower` as failed: no token may follow, and its output is not complete."""
    if follower.failed is None:
        follower.failed = GrammarStatus.TOO_COMPLEX if follower.matcher.gave_up else GrammarStatus.FAILED
    # At debug level only: the library's message may quote the client's grammar.
    log.debug("a constrained request fails: %s", follower.matcher.failure)


def _parted(followers: Sequence[Follower]) -> tuple[list[int], list[int]]:
    """(places to ask together, places to ask alone); a failed follower is in neither."""
    together, alone = list[int](), list[int]()
    for place, follower in enumerate(followers):
        if follower.failed is None:
            (alone if follower.suspected else together).append(place)
    return together, alone
