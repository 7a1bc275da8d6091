"""Results of a finished step become tokens of requests. The only loop over results."""

from __future__ import annotations

import numpy as np

from core.batch.grammar_batch import GrammarStatus
from core.batch.result import StepResult, VectorResult
from core.errors import RequestFailed
from core.invariants import check
from core.scheduler.lifecycle import Lifecycle
from core.scheduler.outputs import Ended, StepTokens
from core.scheduler.snapshot import StatsRecorder
from core.types.arrays import Ints
from core.types.io import FinishReason
from core.types.request import Req


class ResultProcessor:
    """Appends tokens, finds who ends by token or by length, drops what is for a former owner of a row (law 1)."""

    def __init__(
        self, lifecycle: Lifecycle, recorder: StatsRecorder, vocab_size: int, eos_ids: tuple[int, ...]
    ) -> None:
        self._lifecycle = lifecycle
        self._running = lifecycle.running
        self._memory = lifecycle.memory
        self._recorder = recorder
        self._is_eos = np.zeros(vocab_size, np.bool_)
        self._is_eos[list(eos_ids)] = True
        self._last_step = 0

    def process(self, result: StepResult, now: float) -> StepTokens | None:
        """Take over the tokens of one step; None when none of them is for a current owner."""
        check("result_order", result.step_id > self._last_step, step=result.step_id, last=self._last_step)
        self._last_step = result.step_id
        current = self._memory.rows.is_current(result.rows, result.generations)
        self._recorder.step_done(result, stale=len(current) - int(current.sum()))
        places = np.flatnonzero(current)
        if result.grammar_status is not None:
            places = self._end_constrained(result, places, result.grammar_status)
        if result.non_finite.any():
            places = self._fail_non_finite(result, places)
        if result.vectors is not None:
            self._end_embedded(result.vectors, now)
        if len(places) == 0:
            return None
        return self._append(result, places, now)

    def _fail_non_finite(self, result: StepResult, places: Ints) -> Ints:
        bad = result.non_finite[places]
        for row in result.rows[places[bad]].tolist():
            error = RequestFailed("the model produced non-finite logits for this request")
            self._lifecycle.end(Ended(self._req(row), error=error))
        return places[~bad]

    def _end_constrained(self, result: StepResult, places: Ints, status: np.ndarray) -> Ints:
        """End whose constraint allows nothing more; the tokens of those rows mean nothing."""
        is_open = status[places] == GrammarStatus.OPEN
        for place in places[~is_open].tolist():
            req = self._req(int(result.rows[place]))
            if status[place] == GrammarStatus.COMPLETE:
                self._lifecycle.end(Ended(req, FinishReason.STOP))
            else:
                error = RequestFailed("the constraint allows no token here, or is too complex to follow")
                self._lifecycle.end(Ended(req, error=error))
        rest: Ints = places[is_open]
        return rest

    def _end_embedded(self, vectors: VectorResult, now: float) -> None:
        """An embedding ends with its vector; one whose row has a new owner was ended or retracted meanwhile."""
        current = self._memory.rows.is_current(vectors.rows, vectors.generations)
        finite = ~np.any(~np.isfinite(vectors.values), axis=1)
        for place in np.flatnonzero(current).tolist():
            req = self._req(int(vectors.rows[place]))
            if finite[place]:
                req.vector = vectors.values[place]
                self._recorder.embedded(req, now)
                self._lifecycle.end(Ended(req, FinishReason.STOP))
            else:
                error = RequestFailed("the model produced non-finite hidden states for this request")
                self._lifecycle.end(Ended(req, error=error))

    def _append(self, result: StepResult, places: Ints, now: float) -> StepTokens:
        running = self._running
        rows, tokens = result.rows[places], result.tokens[places]
        known = running.known[rows]
        check("output_position", bool((known >= running.prefill_end[rows]).all()), step=result.step_id)
        running.tokens[rows, known] = tokens
        running.known[rows] = known + 1
        positions = known - running.prompt_lens[rows]
        reqs = running.owners(rows)
        out = StepTokens(reqs, tokens.tolist(), positions, result.logprobs, places)
        self._recorder.tokens(reqs, positions, now - running.last_token_at[rows], now)
        running.last_token_at[rows] = now
        self._end_finished(out, rows, tokens, known + 1 > running.limit[rows])
        return out

    def _end_finished(self, out: StepTokens, rows: Ints, tokens: Ints, full: np.ndarray) -> None:
        # Almost nobody ends in a given step: look closely only where some stop token or the length could be the end.
        maybe = full | self._is_eos[tokens] | self._lifecycle.sampling.may_stop(rows, tokens)
        for i in np.flatnonzero(maybe).tolist():
            req, token = out.reqs[i], out.tokens[i]
            if token in req.params.stop_token_ids or (self._is_eos[token] and not req.params.ignore_eos):
                self._lifecycle.end(Ended(req, FinishReason.STOP, token))
            elif full[i]:
                self._lifecycle.end(Ended(req, FinishReason.LENGTH))

    def _req(self, row: int) -> Req:
        req: Req | None = self._running.reqs[row]
        assert req is not None, "a current generation has an owner"
        return req
