"""Matchers of the rows that are constrained, where the tokens they wait for arrive first: on the forward thread.

Law 14: the forward pass of a step is launched without waiting for anything; then, if one of its rows has a grammar,
the tokens of the step before are awaited, accepted and turned into a mask, while the device still works on that forward
pass. Steps without such rows never come here. A matcher follows (row, generation): seeded with what its request has
already when the request gets the row, dropped when the row gets another owner, so a retracted request starts from its
known tokens and what was still in flight for its old row is not accepted twice.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from core.batch.grammar_batch import GrammarStatus, StepGrammars, TokenMask
from core.batch.schedule_batch import ScheduleBatch
from core.device.event import Event
from core.device.recorder import Recorder
from core.executor.grammar_work import Follower, GrammarWork, give_up
from core.sampling.sampler import SampleOutput
from core.types.arrays import Ints

Statuses = npt.NDArray[np.int8]
"""Of GrammarStatus."""


@dataclass(frozen=True, slots=True)
class SampledStep:
    """Tokens on their way to the host: of rows int64[S] with their generations, there once `copy_done`."""

    step_id: int
    rows: Ints
    generations: Ints
    host: SampleOutput
    copy_done: Event


class GrammarTable:
    """Used by the forward thread only."""

    def __init__(self, results: str, recorder: Recorder | None) -> None:
        """`results`: what the recorder knows the host copies of a step by."""
        self._results = results
        self._recorder = recorder
        self._followers: dict[int, Follower] = {}
        self._last: SampledStep | None = None
        self._work = GrammarWork()

    def begin(self, batch: ScheduleBatch) -> None:
        """Rows that got an owner with this step: forget what was there, seat the matchers of constrained ones."""
        if self._followers:
            for row in batch.fresh_rows.tolist():
                self._followers.pop(row, None)
        for seed in batch.grammar_seeds:
            self._followers[seed.row] = self._work.seated(seed)

    def sampled(self, batch: ScheduleBatch, host: SampleOutput, copy_done: Event) -> None:
        """Remember where the tokens of a step with constrained rows will be."""
        if len(batch.sampling.constrained):
            self._last = SampledStep(batch.step_id, batch.sample_rows, batch.sample_generations, host, copy_done)

    def masks(self, batch: ScheduleBatch) -> StepGrammars:
        """Wait for the tokens before this step, and say what may follow them.

        What does not need the tokens is done first: behind the wait, the event loop wants the GIL for the same tokens.
        """
        last, self._last = self._last, None
        going = [] if last is None else self._going(last)
        places = batch.sampling.constrained
        followers = [self._followers[row] for row in batch.sampling.rows[places].tolist()]
        words = np.zeros((len(places), max(follower.grammar.words for follower in followers)), np.int32)
        status = np.zeros(len(batch.sampling), np.int8)
        if last is not None:
            self._accept(last, going)
        status[places] = found = self._statuses(followers, self._work.fill(followers, words))
        # Their tokens are not looked at; any finite logit will do.
        words[found != GrammarStatus.OPEN] = -1
        return StepGrammars(TokenMask(places, words), status)

    def _going(self, last: SampledStep) -> list[tuple[int, Follower]]:
        """Who takes a token of that step, and which of its rows."""
        going = []
        for place, (row, generation) in enumerate(zip(last.rows.tolist(), last.generations.tolist(), strict=True)):
            follower = self._followers.get(row)
            if follower is None or follower.generation != generation or follower.failed is not None:
                continue
            # A terminated one ends with this token, or has ended; the row runs on until the scheduler knows.
            if not follower.is_over():
                going.append((place, follower))
        return going

    def _accept(self, last: SampledStep, going: list[tuple[int, Follower]]) -> None:
        places, followers = [place for place, _ in going], [follower for _, follower in going]
        last.copy_done.synchronize()
        if self._recorder is not None:
            self._recorder.read(self._results, (last.step_id,))
        if followers:
            self._work.accept(followers, last.host.tokens.numpy()[places].tolist())

    def _statuses(self, followers: list[Follower], some: npt.NDArray[np.bool_]) -> Statuses:
        """int8[G]; `some[i]`: something may follow. Almost always true of all, and then no matcher is asked."""
        found = np.full(len(followers), GrammarStatus.OPEN, np.int8)
        for place, follower in enumerate(followers):
            if some[place] and follower.failed is None:
                continue
            if follower.failed is None and not follower.matcher.is_terminated:
                give_up(follower)
            found[place] = GrammarStatus.COMPLETE if follower.failed is None else follower.failed
        return found
