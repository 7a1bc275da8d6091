"""What constrained rows cost a step: quick ones are asked together, the others one at a time and by their budget.

All rows of a library in one call are cheapest, and a call does not tell what each row took. So the clock on the wall
looks at the call, and raises no more than a suspicion: a stalled host makes every step slow, and threads of a library
share their work. Suspected rows are asked one at a time, where all work of a row is on this thread, and the thread's
processor time is charged to the row. It goes back to the others with the first step that took no more than is free.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from core.batch.grammar_batch import GrammarSeed, GrammarStatus
from core.sampling.grammar.budget import RowBudget, SharedBudget
from core.types.grammar import Grammar, Matcher, Words

log = logging.getLogger(__name__)

TOGETHER = 16
"""Rows in one call: what is not known to be slow yet is found out after so many."""
SUSPICIOUS_SECONDS = 2e-3
"""On the wall, of one such call."""


@dataclass(slots=True)
class Follower:
    """The matcher of one owner of a row."""

    generation: int
    grammar: Grammar
    matcher: Matcher
    budget: RowBudget
    suspected: bool = False
    accepting: float = 0.0
    """Processor time of its newest token, which is charged with the mask behind it."""
    failed: GrammarStatus | None = None
    """What its request ends with, as soon as that is known."""

    def is_over(self) -> bool:
        """Whether no text can follow; libraries may have to make a mask to know."""
        if not self.suspected:
            return self.matcher.is_terminated
        began = time.thread_time()
        over = self.matcher.is_terminated
        self.accepting += time.thread_time() - began
        return over


class GrammarWork:
    """Used by one thread. `clock` counts seconds on the wall."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._budget: SharedBudget | None = None

    def seated(self, seed: GrammarSeed) -> Follower:
        """A follower behind the outputs that its request has already; each of them is charged as a step."""
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
        """Each goes on behind its token, or fails."""
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
        """The mask of each into its row of int32[G, W]; bool[G]: whether something may follow."""
        some = np.zeros(len(followers), np.bool_)

        def ask(places: list[int]) -> None:
            first, end = places[0], places[-1] + 1
            is_run = end - first == len(places)
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

    def _together(self, followers: Sequence[Follower], ask: Callable[[list[int]], None]) -> Iterator[int]:
        """Have the quick rows asked, up to the first call that is slow; places of the others, to be asked alone."""
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
        """Whether there is time for a row that has proved heavy; without, it makes room for the others."""
        if follower.budget.is_dear and self._shared.left < 0:
            follower.failed = GrammarStatus.CROWDED
        return follower.failed is None

    def _charge(self, follower: Follower, seconds: float) -> None:
        self._shared.spend(follower.budget.spend(seconds))
        if follower.budget.left < 0:
            follower.failed = follower.failed or GrammarStatus.TOO_COMPLEX


def give_up(follower: Follower) -> None:
    """Nothing may follow, and the output is not complete."""
    if follower.failed is None:
        follower.failed = GrammarStatus.TOO_COMPLEX if follower.matcher.gave_up else GrammarStatus.FAILED
    # The words of the library may quote the client's grammar, so they are for those who look for them.
    log.debug("a constrained request fails: %s", follower.matcher.failure)


def _parted(followers: Sequence[Follower]) -> tuple[list[int], list[int]]:
    """Places of those to be asked together, and of those to be asked alone."""
    together, alone = list[int](), list[int]()
    for place, follower in enumerate(followers):
        if follower.failed is None:
            (alone if follower.suspected else together).append(place)
    return together, alone
