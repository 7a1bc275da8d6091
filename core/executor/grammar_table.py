"""Matchers of the constrained rows, on the forward thread, where the tokens that they wait for arrive first.

Law 14: the forward pass of a step is launched without waiting for anything. Then, if one of its rows has a grammar, the
tokens of the step before are awaited, accepted and turned into a mask, while the device still works on that forward
pass. Steps without such rows never come here.

A matcher belongs to (row, generation). It is seeded with the request's known outputs when the request gets the row, and
dropped when the row gets another owner. So a retracted request starts from its known tokens, and a token that was in
flight for its old row is not accepted twice.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from core.batch.grammar_batch import UNCONSTRAINED, GrammarStatus, StepGrammars, TokenMask
from core.batch.ragged import starts_of
from core.batch.schedule_batch import ScheduleBatch
from core.device.event import Event
from core.device.recorder import Recorder
from core.executor.grammar_work import Follower, GrammarWork, give_up
from core.sampling.sampler import SampleOutput
from core.speculation.verification import KnownDrafts, Outcome
from core.types.arrays import Ints

Statuses = npt.NDArray[np.int8]
"""int8 values of `GrammarStatus`."""


@dataclass(frozen=True, slots=True)
class SampledStep:
    """Tokens of `rows`, int64[S], with their `generations`, on the way to the host; readable once `copy_done` fired.

    Where drafts were verified, `host` has a token for each place, and the verdict says which of them count.
    """

    step_id: int
    rows: Ints
    generations: Ints
    host: SampleOutput
    copy_done: Event
    verdict: Outcome | None = None

    def tokens(self, behind: int) -> Ints:
        """int64[S]: of each row the token with `behind` others of this step before it; -1 where there is none."""
        found: Ints = self.host.tokens.numpy()
        if self.verdict is None:
            return found
        starts, has = self.verdict.starts, self.verdict.counts > behind
        return np.where(has, found[np.where(has, starts + behind, starts)], -1)

    @property
    def most(self) -> int:
        """The most tokens that a row got."""
        return 1 if self.verdict is None else int(self.verdict.counts.max())


class GrammarTable:
    """The matchers by request row. Used by the forward thread only."""

    def __init__(self, results: str, recorder: Recorder | None) -> None:
        """`results`: name of a step's host copies for the recorder."""
        self._results = results
        self._recorder = recorder
        self._followers: dict[int, Follower] = {}
        self._last: SampledStep | None = None
        self._work = GrammarWork()

    def begin(self, batch: ScheduleBatch) -> None:
        """Drop the matchers of rows with a new owner, and make matchers for new owners that are constrained."""
        if self._followers:
            for row in batch.fresh_rows.tolist():
                self._followers.pop(row, None)
        for seed in batch.grammar_seeds:
            self._followers[seed.row] = self._work.seated(seed)

    def sampled(
        self, batch: ScheduleBatch, host: SampleOutput, copy_done: Event, verdict: Outcome | None = None
    ) -> None:
        """Remember where the tokens of a step with constrained rows will arrive, for the next `masks`."""
        if len(batch.sampling.constrained):
            owners = (batch.sample_rows, batch.sample_generations)
            self._last = SampledStep(batch.step_id, *owners, host, copy_done, verdict)

    def masks(self, batch: ScheduleBatch, trial: KnownDrafts | None = None) -> StepGrammars:
        """Wait for the tokens of the step before; return the masks of this step and the status of each row.

        With a `trial` there is a mask for each of its places in constrained rows. Which of these places may count is
        told beside.

        What does not need the tokens is done before the wait: after it the event loop competes for the GIL, since it
        handles the same tokens.
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
        # All bits set: a row that has ended samples from finite logits, and its token is not used.
        words[found != GrammarStatus.OPEN] = -1
        grammars = StepGrammars(TokenMask(places, words), status)
        return grammars if trial is None else self._ahead(grammars, followers, trial)

    def _ahead(self, first: StepGrammars, followers: list[Follower], trial: KnownDrafts) -> StepGrammars:
        """The masks of all places of the constrained rows, of which those in `first` come first."""
        rows = first.mask.places
        counts, starts = trial.counts[rows], starts_of(trial.counts[rows])
        # All bits set, as for rows that have ended: what is sampled at a place without a mask is not used.
        words = np.full((int(counts.sum()), first.mask.words.shape[1]), -1, np.int32)
        words[starts] = first.mask.words
        masked: Ints = np.full(len(first.status), UNCONSTRAINED, np.int64)
        masked[rows] = 1
        for place in np.flatnonzero((counts > 1) & (first.status[rows] == GrammarStatus.OPEN)).tolist():
            row, start, count = rows[place], starts[place], counts[place]
            drafts = trial.ids[trial.starts[row] + 1 :][: count - 1].tolist()
            masked[row] += self._work.look_ahead(followers[place], drafts, words[start : start + count])
        return StepGrammars(TokenMask(rows, words), first.status, masked)

    def _going(self, last: SampledStep) -> list[tuple[int, Follower]]:
        """(place in that step, follower) of the matchers that must accept a token of it."""
        going = []
        for place, (row, generation) in enumerate(zip(last.rows.tolist(), last.generations.tolist(), strict=True)):
            follower = self._followers.get(row)
            if follower is not None and follower.generation == generation and _goes_on(follower):
                going.append((place, follower))
        return going

    def _accept(self, last: SampledStep, going: list[tuple[int, Follower]]) -> None:
        last.copy_done.synchronize()
        if self._recorder is not None:
            self._recorder.read(self._results, (last.step_id,))
        for behind in range(last.most):
            tokens = last.tokens(behind).tolist()
            if behind:
                going = [(place, each) for place, each in going if tokens[place] >= 0 and _goes_on(each)]
            if not going:
                break
            self._work.accept([each for _, each in going], [tokens[place] for place, _ in going])

    def _statuses(self, followers: list[Follower], some: npt.NDArray[np.bool_]) -> Statuses:
        """int8[G] of `GrammarStatus`; `some[i]`: the mask of follower i allows a token.

        A matcher is asked only where it allows none, which is rare.
        """
        found = np.full(len(followers), GrammarStatus.OPEN, np.int8)
        for place, follower in enumerate(followers):
            if some[place] and follower.failed is None:
                continue
            if follower.failed is None and not follower.matcher.is_terminated:
                give_up(follower)
            found[place] = GrammarStatus.COMPLETE if follower.failed is None else follower.failed
        return found


def _goes_on(follower: Follower) -> bool:
    """Whether it accepts more tokens. Behind its end a row runs on until the scheduler knows."""
    return follower.failed is None and not follower.is_over()
