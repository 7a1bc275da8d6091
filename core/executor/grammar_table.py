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
from core.types.grammar import Matcher

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
    matcher: Matcher
    words: int
    failed: bool = False


class GrammarTable:
    """Used by the forward thread only."""

    def __init__(self, results: str, recorder: Recorder | None) -> None:
        """`results`: what the recorder knows the host copies of a step by."""
        self._results = results
        self._recorder = recorder
        self._followers: dict[int, Follower] = {}
        self._last: SampledStep | None = None

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
        words = np.zeros((len(places), max(follower.words for follower in followers)), np.int32)
        status = np.zeros(len(batch.sampling), np.int8)
        for i, (place, follower) in enumerate(zip(places.tolist(), followers, strict=True)):
            status[place] = self._fill(follower, words[i])
            if status[place]:
                # Its token is not looked at; any finite logit will do.
                words[i] = -1
        return StepGrammars(TokenMask(places, words), status)

    def _accept_last(self) -> None:
        last, self._last = self._last, None
        if last is None:
            return
        last.copy_done.synchronize()
        if self._recorder is not None:
            self._recorder.read(self._results, (last.step_id,))
        tokens = last.host.tokens.numpy()
        for place, row in enumerate(last.rows.tolist()):
            follower = self._followers.get(row)
            if follower is None or follower.generation != last.generations[place] or follower.failed:
                continue
            if follower.matcher.is_terminated:
                # It ends with this token, or has ended; the row runs on until the scheduler knows.
                continue
            if not follower.matcher.accept(int(tokens[place])):
                self._fail(follower)

    def _fill(self, follower: Follower, words: np.ndarray) -> GrammarStatus:
        if follower.failed:
            return GrammarStatus.FAILED
        began = time.monotonic()
        if follower.matcher.fill(words) and time.monotonic() - began < MAX_MASK_SECONDS:
            return GrammarStatus.OPEN
        if follower.matcher.is_terminated:
            return GrammarStatus.COMPLETE
        self._fail(follower)
        return GrammarStatus.FAILED

    def _fail(self, follower: Follower) -> None:
        follower.failed = True
        # The words of the library may quote the client's grammar, so they are for those who look for them.
        log.debug("a constrained request fails: %s", follower.matcher.failure)


def _seated(seed: GrammarSeed) -> Follower:
    matcher = seed.grammar.matcher()
    follower = Follower(seed.generation, matcher, seed.grammar.words)
    for token in seed.outputs.tolist():
        follower.failed = follower.failed or not matcher.accept(token)
    return follower
