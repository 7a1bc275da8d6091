"""Results of a finished step become tokens of requests. The only loop over results."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from core.batch.grammar_batch import GrammarStatus
from core.batch.ragged import starts_of, walk_runs
from core.batch.result import Exhausted, ScoredPrompts, StepResult, VectorResult
from core.errors import InvalidRequest, Overloaded, RequestFailed, SlipstreamError
from core.invariants import check
from core.scheduler.lifecycle import Lifecycle
from core.scheduler.outputs import Ending, StepTokens
from core.scheduler.tally import Tally
from core.types.arrays import Bools, Ints
from core.types.io import FinishReason
from core.types.request import Req

EXHAUSTED = "DEVICE_MEMORY"
"""Reason of the error (RESOURCE_EXHAUSTED) where memory of the device ran out: worth a try elsewhere or with less."""

GRAMMAR_WORK = "GRAMMAR_WORK"
"""Reason of the error where the constraints of all requests together cost too much: worth trying again."""


@dataclass(frozen=True, slots=True)
class NewTokens:
    """Tokens of one step, row after row: `tokens[i]` is number `known[i]` of the sequence in `rows[i]`; int64[A]."""

    rows: Ints
    known: Ints
    tokens: Ints
    places: Ints
    """Where each stands in the step's result."""
    counts: Ints | None = None
    """How many of these tokens its row has; None for one each."""
    drafts: Bools | None = None
    """Which were drafts; None where none was."""

    def of(self, which: Bools) -> NewTokens:
        """Those at the places, bool[A], that are set."""
        rows = self.rows[which]
        # Counted again: a row may lose some of its tokens.
        counts = None if self.counts is None else np.bincount(rows)[rows]
        drafts = None if self.drafts is None else self.drafts[which]
        return NewTokens(rows, self.known[which], self.tokens[which], self.places[which], counts, drafts)

    def gaps(self, since: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """float64[A], in seconds: the time `since` the step's tokens before, shared by the tokens of a row."""
        return since if self.counts is None else since / self.counts


class ResultProcessor:
    """Appends tokens, ends requests by token or length, and drops tokens for former owners of a row (law 1)."""

    def __init__(self, lifecycle: Lifecycle, tally: Tally, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        self._lifecycle = lifecycle
        self._running = lifecycle.running
        self._memory = lifecycle.memory
        self._tally = tally
        self._is_eos = np.zeros(vocab_size, np.bool_)
        self._is_eos[list(eos_ids)] = True
        self._last_step = 0

    def process(self, result: StepResult, now: float) -> list[StepTokens]:
        """Take over the tokens of one step: those of prompts first, if some are told, then the new ones, if there are.

        `now`: seconds of the loop's clock. Raises InvariantViolation for a result that is not newer than the last.
        """
        # Before the new tokens, which may end a request.
        told = None if result.scored is None else self._told(result.scored)
        return [each for each in (told, self._process(result, now)) if each is not None]

    def _told(self, scored: ScoredPrompts) -> StepTokens | None:
        """Tokens of prompts with log probabilities that were not told before; None where all owners are gone."""
        batch = scored.batch
        current = self._memory.rows.is_current(batch.rows, batch.generations)
        reqs, places, positions = list[Req](), list[Ints](), list[Ints]()
        for at in np.flatnonzero(current).tolist():
            req, start, count = self._req(int(batch.rows[at])), int(batch.starts[at]), int(batch.counts[at])
            # After a retraction the prompt is computed again, and with it what was told.
            skipped = min(count, max(0, req.scored + 1 - start))
            first = int(starts_of(batch.counts)[at]) + skipped
            places.append(np.arange(first, first + count - skipped))
            positions.append(np.arange(start + skipped, start + count) - req.prompt_len)
            reqs += [req] * (count - skipped)
            req.scored = max(req.scored, start + count - 1)
        if not reqs:
            return None
        rows, behind = np.concatenate(places), np.concatenate(positions)
        return StepTokens(reqs, batch.targets[rows].tolist(), behind, scored.found, rows, of_prompts=True)

    def _process(self, result: StepResult, now: float) -> StepTokens | None:
        check("result_order", result.step_id > self._last_step, step=result.step_id, last=self._last_step)
        self._last_step = result.step_id
        if result.vectors is not None:
            self._end_embedded(result.vectors, now)
        current = self._memory.rows.is_current(result.rows, result.generations)
        self._tally.step_done(result, stale=len(current) - int(np.count_nonzero(current)))
        if len(result.exhausted):
            self._end_exhausted(result.exhausted)
            # Asked again: the requests just ended have lost their rows.
            current = self._memory.rows.is_current(result.rows, result.generations)
        places = np.flatnonzero(current)
        if result.grammar_status is not None:
            places = self._end_constrained(result, places, result.grammar_status)
        bad = result.non_finite if result.violated is None else result.non_finite | result.violated
        if bad.any():
            places = self._fail_untrusted(result, places, bad)
        if len(places) == 0:
            return None
        return self._append(result, places, now)

    def _fail_untrusted(self, result: StepResult, places: Ints, bad: Bools) -> Ints:
        """Fail rows whose token means nothing; returns the places, int64[n], of rows that go on.

        The request that found least in the cache goes first. Other bad rows may have read what it computed: `condemn`
        retracts those, so they are computed again and do not fail with it.
        """
        violated = result.violated
        failed = 0
        untrusted = places[bad[places]]
        for place in untrusted[np.argsort(self._memory.pages_found(result.rows[untrusted]), kind="stable")].tolist():
            if not self._is_current(result, np.array([place]))[0]:
                # Retracted above, as a reader of what an earlier one computed.
                continue
            failed += 1
            if violated is not None and violated[place]:
                error = RequestFailed("this request's newest token was lost inside the engine")
            else:
                error = RequestFailed(_not_finite(self._req(int(result.rows[place]))))
            self._lifecycle.condemn(Ending(self._req(int(result.rows[place])), error=error))
        rest: Ints = places[self._is_current(result, places)]
        self._tally.dropped(len(places) - len(rest) - failed)
        return rest

    def _is_current(self, result: StepResult, places: Ints) -> Bools:
        return self._memory.rows.is_current(result.rows[places], result.generations[places])

    def _end_exhausted(self, exhausted: Exhausted) -> None:
        """End the requests that memory did not suffice for, and no others. What they have in the pools is sound."""
        current = self._memory.rows.is_current(exhausted.rows, exhausted.generations)
        for row in exhausted.rows[current].tolist():
            error = Overloaded("the device has no memory for this request's options", reason=EXHAUSTED)
            self._lifecycle.end(Ending(self._req(row), error=error))

    def _end_constrained(self, result: StepResult, places: Ints, status: np.ndarray) -> Ints:
        """End requests whose constraint allows no token; returns the places, int64[n], of rows that go on.

        Tokens of the other rows mean nothing.
        """
        is_open = status[places] == GrammarStatus.OPEN
        for place in places[~is_open].tolist():
            req = self._req(int(result.rows[place]))
            if status[place] == GrammarStatus.COMPLETE:
                self._lifecycle.end(Ending(req, FinishReason.STOP))
            else:
                self._lifecycle.end(Ending(req, error=_unfollowed(req, GrammarStatus(int(status[place])))))
        rest: Ints = places[is_open]
        return rest

    def _end_embedded(self, vectors: VectorResult, now: float) -> None:
        """End embeddings with their vectors. A vector is dropped if its owner was ended or retracted meanwhile."""
        is_owner = self._memory.rows.is_owner
        finite: Bools = np.asarray(np.isfinite(vectors.values).all(axis=1), np.bool_)
        rows, generations = vectors.rows.tolist(), vectors.generations.tolist()
        # Embeddings that fail come first, in the order of `_fail_untrusted`: others may have read what they computed.
        for place in np.lexsort((self._memory.pages_found(vectors.rows), finite)).tolist():
            if not is_owner(rows[place], generations[place]):
                continue
            req = self._running.owner(rows[place])
            if finite[place]:
                req.vector = vectors.values[place]
                self._memory.vouch(req.row, req.prompt_len)
                self._tally.embedded(req, now)
                self._lifecycle.end(Ending(req, FinishReason.STOP))
            else:
                error = RequestFailed("the model produced non-finite hidden states for this request")
                self._lifecycle.condemn(Ending(req, error=error))

    def _append(self, result: StepResult, places: Ints, now: float) -> StepTokens:
        """Append the tokens of the rows at `places` to their requests, and end the requests that are complete."""
        new = self._new_tokens(result, places)
        running, rows, known = self._running, new.rows, new.known
        ends = running.prefill_end[rows]
        check("output_position", bool((known >= ends).all()), step=result.step_id)
        for row in rows[known == ends].tolist():
            # The first token since the admission: its logits came of all tokens before it.
            self._lifecycle.computed(row, int(running.known[row]))
        made = len(new.rows)
        new, endings = self._cut(new)
        self._tally.surplus(made - len(new.rows))
        self._keep(new, result, places)
        rows, known = new.rows, new.known
        positions = known - running.prompt_lens[rows]
        reqs = running.owners(rows)
        out = StepTokens(reqs, new.tokens.tolist(), positions, result.logprobs, new.places, new.drafts)
        self._tally.tokens(reqs, positions, new.gaps(now - running.last_token_at[rows]), now)
        running.last_token_at[rows] = now
        for ending in endings:
            self._lifecycle.end(ending)
        return out

    def _keep(self, new: NewTokens, result: StepResult, places: Ints) -> None:
        """Make `new` the known tokens of the rows at `places`."""
        running, accepted = self._running, result.accepted
        if accepted is None:
            running.append(new.rows, new.known, new.tokens)
            return
        seated = result.rows[places]
        before = running.known[seated]
        running.append(new.rows, new.known, new.tokens)
        running.settle(result.step_id, seated, before, accepted.planned[places])
        running.drafted_in(seated, before, accepted.of(places))

    def _new_tokens(self, result: StepResult, places: Ints) -> NewTokens:
        """The tokens of the rows at `places`, int64[n] of S, in order."""
        running, accepted = self._running, result.accepted
        rows = result.rows[places]
        known = running.known[rows]
        if accepted is None:
            return NewTokens(rows, known, result.tokens[places], places)
        counts = accepted.counts[places]
        each, behind = walk_runs(counts)
        found = starts_of(accepted.counts)[places][each] + behind
        counts = counts[each]
        return NewTokens(rows[each], known[each] + behind, result.tokens[found], found, counts, behind < counts - 1)

    def _cut(self, new: NewTokens) -> tuple[NewTokens, list[Ending]]:
        """(`new` without what stands behind the end of its request, how requests end), in the order of tokens.

        A stop token counts before the length.
        """
        full = new.known + 1 > self._running.limit[new.rows]
        # Few requests end in a given step: look closely only where a stop token or the length could be the end.
        maybe = full | self._is_eos[new.tokens] | self._lifecycle.sampling.may_stop(new.rows, new.tokens)
        if np.count_nonzero(maybe) == 0:
            return new, []
        endings: dict[int, Ending] = {}
        surplus = list[Bools]()
        for i in np.flatnonzero(maybe).tolist():
            row, token = int(new.rows[i]), int(new.tokens[i])
            if row in endings:
                continue
            req = self._req(row)
            if token in req.params.stop_token_ids or (self._is_eos[token] and not req.params.ignore_eos):
                endings[row] = Ending(req, FinishReason.STOP, token)
            elif full[i]:
                endings[row] = Ending(req, FinishReason.LENGTH)
            else:
                continue
            if new.counts is not None:
                surplus.append((new.rows == row) & (new.known > new.known[i]))
        kept = new.of(~np.logical_or.reduce(surplus)) if surplus else new
        return kept, list(endings.values())

    def _req(self, row: int) -> Req:
        return self._running.owner(row)


def _not_finite(req: Req) -> str:
    said = "the model produced non-finite logits for this request"
    # A tower that fails leaves features that are no numbers.
    return f"{said}: its vision tower may have failed at an image, see the log" if req.images.placed else said


def _unfollowed(req: Req, status: GrammarStatus) -> SlipstreamError:
    if status is GrammarStatus.TOO_COMPLEX:
        field = "constraint" if req.grammar is None else req.grammar.field
        return InvalidRequest.of(field, "takes more work to follow than a request may cost")
    if status is GrammarStatus.CROWDED:
        return Overloaded("the constraints of all requests take too much work now", reason=GRAMMAR_WORK)
    return RequestFailed("the constraint allows no token here")
