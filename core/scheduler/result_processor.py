"""Results of a finished step become tokens of requests. The only loop over results."""

from __future__ import annotations

import numpy as np

from core.batch.grammar_batch import GrammarStatus
from core.batch.result import Exhausted, StepResult, VectorResult
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

    def process(self, result: StepResult, now: float) -> StepTokens | None:
        """Take over the tokens of one step; None when none of them is for a current owner.

        `now`: seconds of the loop's clock. Raises InvariantViolation for a result that is not newer than the last.
        """
        check("result_order", result.step_id > self._last_step, step=result.step_id, last=self._last_step)
        self._last_step = result.step_id
        if result.vectors is not None:
            self._end_embedded(result.vectors, now)
        current = self._memory.rows.is_current(result.rows, result.generations)
        self._tally.step_done(result, stale=len(current) - int(current.sum()))
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
        for place in sorted(
            places[bad[places]].tolist(), key=lambda place: self._memory.shared(int(result.rows[place]))
        ):
            if not self._is_current(result, np.array([place]))[0]:
                # Retracted above, as a reader of what an earlier one computed.
                continue
            failed += 1
            if violated is not None and violated[place]:
                error = RequestFailed("this request's newest token was lost inside the engine")
            else:
                error = RequestFailed("the model produced non-finite logits for this request")
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
        is_current = self._memory.rows.is_current
        finite: Bools = np.asarray(np.isfinite(vectors.values).all(axis=1), np.bool_)
        found = [self._memory.shared(row) for row in vectors.rows.tolist()]
        # Embeddings that fail come first, in the order of `_fail_untrusted`: others may have read what they computed.
        for place in np.lexsort((np.asarray(found), finite)).tolist():
            if not is_current(vectors.rows[[place]], vectors.generations[[place]])[0]:
                continue
            req = self._req(int(vectors.rows[place]))
            if finite[place]:
                req.vector = vectors.values[place]
                self._memory.vouch(req.row, req.prompt_len)
                self._tally.embedded(req, now)
                self._lifecycle.end(Ending(req, FinishReason.STOP))
            else:
                error = RequestFailed("the model produced non-finite hidden states for this request")
                self._lifecycle.condemn(Ending(req, error=error))

    def _append(self, result: StepResult, places: Ints, now: float) -> StepTokens:
        """Append the tokens at `places` to their requests, and end the requests that are complete."""
        running = self._running
        rows, tokens = result.rows[places], result.tokens[places]
        known = running.known[rows]
        ends = running.prefill_end[rows]
        check("output_position", bool((known >= ends).all()), step=result.step_id)
        for row in rows[known == ends].tolist():
            # The first token since the admission: its logits came of all tokens before it.
            self._memory.vouch(row, int(running.known[row]))
        running.tokens[rows, known] = tokens
        running.known[rows] = known + 1
        positions = known - running.prompt_lens[rows]
        reqs = running.owners(rows)
        out = StepTokens(reqs, tokens.tolist(), positions, result.logprobs, places)
        self._tally.tokens(reqs, positions, now - running.last_token_at[rows], now)
        running.last_token_at[rows] = now
        self._end_finished(out, rows, tokens, known + 1 > running.limit[rows])
        return out

    def _end_finished(self, out: StepTokens, rows: Ints, tokens: Ints, full: np.ndarray) -> None:
        # Few requests end in a given step: look closely only where a stop token or the length could be the end.
        maybe = full | self._is_eos[tokens] | self._lifecycle.sampling.may_stop(rows, tokens)
        for i in np.flatnonzero(maybe).tolist():
            req, token = out.reqs[i], out.tokens[i]
            if token in req.params.stop_token_ids or (self._is_eos[token] and not req.params.ignore_eos):
                self._lifecycle.end(Ending(req, FinishReason.STOP, token))
            elif full[i]:
                self._lifecycle.end(Ending(req, FinishReason.LENGTH))

    def _req(self, row: int) -> Req:
        req: Req | None = self._running.reqs[row]
        assert req is not None, "a current generation has an owner"
        return req


def _unfollowed(req: Req, status: GrammarStatus) -> SlipstreamError:
    if status is GrammarStatus.TOO_COMPLEX:
        field = "constraint" if req.grammar is None else req.grammar.field
        return InvalidRequest.of(field, "takes more work to follow than a request may cost")
    if status is GrammarStatus.CROWDED:
        return Overloaded("the constraints of all requests take too much work now", reason=GRAMMAR_WORK)
    return RequestFailed("the constraint allows no token here")
