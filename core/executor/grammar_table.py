"""Matchers of the rows that are constrained, where the tokens they wait for arrive first: on the forward thread.

Law 14: the forward pass of a step is launched without waiting for anything; then, if one of its rows has a grammar,
the tokens of the step before are awaited, accepted and turned into a mask, while the device still works on that forward
pass. Steps without such rows never come here. A matcher follows (row, generation): seeded with what its request has
already when the request gets the row, dropped when the row gets another owner, so a retracted request starts from its
known tokens and what was still in flight for its old row is not accepted twice.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import numpy as np

from core.batch.grammar_batch import GrammarSeed, GrammarStatus, StepGrammars, TokenMask
from core.batch.schedule_batch import ScheduleBatch
from core.device.recorder import Recorder
from core.device.streams import Event
from core.sampling.sampler import SampleOutput
from core.types.arrays import Ints
from core.types.grammar import Grammar, Matcher, Words

log = logging.getLogger(__name__)

MAX_MASK_SECONDS = 1.0
"""A request whose grammar takes longer for one token fails: everybody else in its step waits for it."""


@dataclass(frozen=True, slots=True)
class SampledStep:
    """Tokens on their way to the host: of rows int64[S] with their generations, there once `copy_done`."""

    step_id: int
    rows: Ints
    generations: Ints
    host: SampleOutput
    copy_done: Event


@dataclass(slots=True)
class Follower:
    """The matcher of one owner of a row."""

    generation: int
    grammar: Grammar
    matcher: Matcher
    failed: bool = False


class GrammarTable:
    """Used by the forward thread only."""

    def __init__(self, results: str, recorder: Recorder | None) -> None:
        """`results`: what the recorder knows the host copies of a step by."""
        self._results = results
        self._recorder = recorder
        self._followers: dict[int, Follower] = {}
        self._last: SampledStep | None = None
        self._was_slow = False

    def begin(self, batch: ScheduleBatch) -> None:
        """Rows that got an owner with this step: forget what was there, seat the matchers of constrained ones."""
        if self._followers:
            for row in batch.fresh_rows.tolist():
                self._followers.pop(row, None)
        for seed in batch.grammar_seeds:
            self._followers[seed.row] = _seated(seed)

    def sampled(self, batch: ScheduleBatch, host: SampleOutput, copy_done: Event) -> None:
        """Remember where the tokens of a step with constrained rows will be."""
        if len(batch.sampling.constrained):
            self._last = SampledStep(batch.step_id, batch.sample_rows, batch.sample_generations, host, copy_done)

    def masks(self, batch: ScheduleBatch) -> StepGrammars:
        """Wait for the tokens before this step, and say what may follow them."""
        self._accept_last()
        places = batch.sampling.constrained
        followers = [self._followers[row] for row in batch.sampling.rows[places].tolist()]
        words = np.zeros((len(places), max(follower.grammar.words for follower in followers)), np.int32)
        status = np.zeros(len(batch.sampling), np.int8)
        fill = self._fill_each if self._was_slow else self._fill_all
        began = time.monotonic()
        status[places] = fill(followers, words)
        self._was_slow = time.monotonic() - began > MAX_MASK_SECONDS
        # Their tokens are not looked at; any finite logit will do.
        words[status[places] != GrammarStatus.OPEN] = -1
        return StepGrammars(TokenMask(places, words), status)

    def _accept_last(self) -> None:
        last, self._last = self._last, None
        if last is None:
            return
        last.copy_done.synchronize()
        if self._recorder is not None:
            self._recorder.read(self._results, (last.step_id,))
        tokens = last.host.tokens.tolist()
        going: list[tuple[Follower, int]] = []
        for row, generation, token in zip(last.rows.tolist(), last.generations.tolist(), tokens, strict=True):
            follower = self._followers.get(row)
            if follower is None or follower.generation != generation or follower.failed:
                continue
            # A terminated one ends with this token, or has ended; the row runs on until the scheduler knows.
            if not follower.matcher.is_terminated:
                going.append((follower, token))
        if not going:
            return
        matchers = [follower.matcher for follower, _ in going]
        accepted = going[0][0].grammar.accept_all(matchers, [token for _, token in going])
        for (follower, _), fine in zip(going, accepted, strict=True):
            if not fine:
                self._fail(follower)

    def _fill_all(self, followers: list[Follower], words: Words) -> list[GrammarStatus]:
        some = followers[0].grammar.fill_all([follower.matcher for follower in followers], words)
        return [self._status(follower, bool(any_)) for follower, any_ in zip(followers, some, strict=True)]

    def _fill_each(self, followers: list[Follower], words: Words) -> list[GrammarStatus]:
        """After a step whose masks took too long: find out whose they were."""
        found = []
        for follower, row in zip(followers, words, strict=True):
            began = time.monotonic()
            some = follower.matcher.fill(row)
            found.append(self._status(follower, some and time.monotonic() - began < MAX_MASK_SECONDS))
        return found

    def _status(self, follower: Follower, some: bool) -> GrammarStatus:
        if not some and not follower.failed and follower.matcher.is_terminated:
            return GrammarStatus.COMPLETE
        if not some and not follower.failed:
            self._fail(follower)
        return GrammarStatus.FAILED if follower.failed else GrammarStatus.OPEN

    def _fail(self, follower: Follower) -> None:
        follower.failed = True
        # The words of the library may quote the client's grammar, so they are for those who look for them.
        log.debug("a constrained request fails: %s", follower.matcher.failure)


def _seated(seed: GrammarSeed) -> Follower:
    matcher = seed.grammar.matcher()
    follower = Follower(seed.generation, seed.grammar, matcher)
    for token in seed.outputs.tolist():
        follower.failed = follower.failed or not matcher.accept(token)
    return follower
