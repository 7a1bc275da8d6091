"""From a step's logits to tokens: token history, grammars and sampler together, also when memory is short.

Everything in a step that grows with rows times vocabulary is allocated here, for options that clients choose. So a lack
of memory here first splits the work, then ends the rows that do not fit alone, and never ends the engine (decision 25).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch

from core.batch.result import NO_ROWS, Exhausted
from core.batch.sampling_batch import SamplingBatch
from core.batch.schedule_batch import HistoryWrites, ScheduleBatch
from core.device.event import Event
from core.device.recorder import Recorder
from core.device.shortage import MEMORY_ERRORS, is_out_of_memory, shortage
from core.device.staging import Staging
from core.executor.grammar_table import GrammarTable, Statuses
from core.executor.verification import Attempt
from core.memory.req_to_token_pool import ReqToTokenPool
from core.sampling.compiled import CompiledSampler, takes
from core.sampling.penalties import Beginnings, TokenHistory, has_penalty
from core.sampling.places import Places
from core.sampling.sampler import SampleOutput, Sampler, Scored
from core.sampling.splitting import sample_in_pieces
from core.speculation.verification import Outcome, Tried
from core.types.arrays import Ints

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SampledRows:
    """What S rows sampled, on the device, and what the host must know of them besides tokens."""

    output: SampleOutput
    status: Statuses | None = None
    """int8[S] of GrammarStatus; None if no row is constrained."""
    exhausted: Exhausted = field(default=NO_ROWS)
    """Rows for which there was too little memory."""
    was_split: bool = False
    """Whether the rows were sampled in pieces, for lack of memory."""
    masked: Ints | None = None
    """int64[S]: at how many places of each row a token may count; None for all."""


class StepSampling(Protocol):
    """What a step does about tokens; see `SamplingStep`."""

    def compile(self, module: Any) -> None: ...

    def carried(self, batch: ScheduleBatch, attempt: Attempt | None = None) -> list[np.ndarray]: ...

    def begin(self, batch: ScheduleBatch, staging: Staging) -> None: ...

    def sample(
        self, logits: torch.Tensor, batch: ScheduleBatch, lens: torch.Tensor, trial: Tried | None = None
    ) -> SampledRows: ...

    def append(self, rows: torch.Tensor, lens: torch.Tensor, tokens: torch.Tensor, batch: ScheduleBatch) -> None: ...

    def on_their_way(
        self, batch: ScheduleBatch, host: SampleOutput, copy_done: Event, verdict: Outcome | None
    ) -> None: ...


class SamplingStep:
    """Turns the logits of each step into tokens. Forward stream only (law 2)."""

    def __init__(self, pool: ReqToTokenPool, sampler: Sampler, results: str, recorder: Recorder | None) -> None:
        """`results`: name of a step's host copies for the recorder."""
        self._pool = pool
        self._staging = Staging(pool.device)
        """Of the step that has begun last."""
        self._sampler = sampler
        self._recorder = recorder
        self._history: TokenHistory | None = None
        self._grammars = GrammarTable(results, recorder)
        # Rows with penalties whose history found no memory; their owners end with their first sample.
        self._unseeded: set[int] = set()
        self._compiled: CompiledSampler | None = None
        self._seeds: tuple[HistoryWrites, Beginnings] | None = None
        self._spread: tuple[SamplingBatch, SamplingBatch] | None = None
        """What `carried` made last of options of rows: those of the places of a grid."""

    def compile(self, module: Any) -> None:
        """On the CPU, sample in compiled code from now on, where that can; `module`: see `core.native.host`."""
        self._compiled = CompiledSampler(module, self._sampler.vocab_size)

    def carried(self, batch: ScheduleBatch, attempt: Attempt | None = None) -> list[np.ndarray]:
        """Host arrays that sampling `batch` is going to upload, masks apart: those very objects.

        `attempt`: what it tries of drafts that the host does not know.
        """
        sampling, self._spread = batch.sampling, None
        if attempt is not None:
            sampling = attempt.spread(batch.sampling)
            self._spread = batch.sampling, sampling
        arrays: list[np.ndarray] = [*Places.carried(sampling), *self._sampler.carried(sampling)]
        if batch.history_writes.rows:
            self._seeds = batch.history_writes, Beginnings.of(batch.history_writes.rows, batch.history_writes.ids)
            arrays += self._seeds[1]
        return arrays

    def begin(self, batch: ScheduleBatch, staging: Staging) -> None:
        """Prepare rows with a new owner: write token histories for penalties, and make matchers for constraints.

        `staging`: may have arrays of the step on the device already.
        """
        self._staging = staging
        if self._unseeded:
            self._unseeded.difference_update(batch.fresh_rows.tolist())
        if batch.history_writes.rows:
            self._seed_history(batch)
        self._grammars.begin(batch)

    def sample(
        self, logits: torch.Tensor, batch: ScheduleBatch, lens: torch.Tensor, trial: Tried | None = None
    ) -> SampledRows:
        """Draw the next tokens of S rows from `logits`, float32[S, V], which it modifies in place.

        `lens`, int64[S]: tokens before each, on the device. With a `trial` there is a token for each of its T places,
        and T stands for S everywhere but in the status.
        The forward pass is already launched. Only a batch with constrained rows waits here, for the tokens of the step
        before (law 14).
        """
        sampling, lost = batch.sampling, _NOBODY
        if self._compiled is not None and takes(sampling):
            found = self._in_compiled_code(self._compiled, logits, sampling, lens, trial)
            if found is not None:
                return found
        if trial is not None:
            sampling = self._spread_over(sampling, trial)
            self._try(batch, trial)
        if sampling.any_penalty and self._unseeded:
            sampling, lost = self._without_history(sampling)
        scored = Scored(logits, Places.of(sampling, lens, self._staging), self._staging)
        mask, status, masked = None, None, None
        # Before the grammars: scoring needs no mask, and the device works on it while the host waits for tokens.
        fits = self._score(scored, sampling)
        if len(sampling.constrained):
            # Once per step, even if sampling is tried again in pieces: it consumes the tokens of the step before.
            grammars = self._grammars.masks(batch, None if trial is None else trial.on_host)
            mask, status = replace(grammars.mask, places=sampling.constrained), grammars.status
            masked = grammars.masked
        output = None
        if fits:
            try:
                output = self._sampler.pick(scored, sampling, mask)
            except MEMORY_ERRORS as error:
                self._note(error)
        if output is not None:
            return SampledRows(output, status, _exhausted(batch, lost, trial), masked=masked)
        pieces = sample_in_pieces(self._sampler, scored, sampling, self._history, mask)
        exhausted = _exhausted(batch, np.union1d(lost, pieces.given_up), trial)
        return SampledRows(pieces.output, status, exhausted, True, masked)

    def _in_compiled_code(
        self,
        compiled: CompiledSampler,
        logits: torch.Tensor,
        sampling: SamplingBatch,
        lens: torch.Tensor,
        trial: Tried | None,
    ) -> SampledRows | None:
        """As `sample`, for options that `takes` accepts; None where memory is short."""
        try:
            if sampling.all_greedy:
                # No place has options of its own: those of its row need not be spread over all that it tries.
                return SampledRows(compiled.greedy(logits))
            return SampledRows(compiled.sample(logits, sampling if trial is None else trial.spread(sampling), lens))
        except MEMORY_ERRORS as error:
            self._note(error)
            return None

    def append(self, rows: torch.Tensor, lens: torch.Tensor, tokens: torch.Tensor, batch: ScheduleBatch) -> None:
        """Enter `tokens` of `rows` into the history at positions `lens`; int64[S] each, on the device."""
        if self._history is not None and batch.sampling.any_penalty:
            self._history.append(rows, lens, tokens)

    def on_their_way(self, batch: ScheduleBatch, host: SampleOutput, copy_done: Event, verdict: Outcome | None) -> None:
        """Tell the grammars that the step's tokens are on their way to `host`, readable once `copy_done` has fired.

        `verdict`: which of them count; None where all do.
        """
        self._grammars.sampled(batch, host, copy_done, verdict)

    def _spread_over(self, sampling: SamplingBatch, trial: Tried) -> SamplingBatch:
        """The options of the places of `trial`: the very ones that were sent with the step, where they were."""
        if self._spread is not None and self._spread[0] is sampling:
            return self._spread[1]
        return trial.spread(sampling)

    def _try(self, batch: ScheduleBatch, trial: Tried) -> None:
        """Enter the drafts into the history: at each place those before it count. What is wrong is overwritten."""
        if self._history is not None and batch.sampling.any_penalty:
            self._history.append(*trial.entries(batch.rows, self._staging))

    def _score(self, scored: Scored, sampling: SamplingBatch) -> bool:
        """Score all rows at once, as far as that needs no mask. Returns whether there was memory for it."""
        try:
            self._sampler.score_on(scored, sampling, self._history)
        except MEMORY_ERRORS as error:
            self._note(error)
            return False
        return True

    def _seed_history(self, batch: ScheduleBatch) -> None:
        seeds = batch.history_writes
        try:
            if self._history is None:
                # Rows x context entries: allocated with the first request that has penalties.
                buffer = self._pool.new_row_buffer((self._pool.max_context_len,), torch.int32)
                self._history = TokenHistory(buffer, self._recorder)
            found = self._seeds is not None and self._seeds[0] is seeds
            known = self._seeds[1] if self._seeds is not None and found else Beginnings.of(seeds.rows, seeds.ids)
            self._history.start(seeds.rows, known, self._staging)
            self._seeds = None
        except MEMORY_ERRORS as error:
            self._note(error)
            self._unseeded.update(seeds.rows)

    def _without_history(self, sampling: SamplingBatch) -> tuple[SamplingBatch, Ints]:
        """The options with no penalties on unseeded rows, and the places int64[n] of these rows."""
        lost = np.flatnonzero(np.isin(sampling.rows, list(self._unseeded)))
        repetition, frequency, presence = (
            column.copy()
            for column in (
                sampling.repetition_penalties,
                sampling.frequency_penalties,
                sampling.presence_penalties,
            )
        )
        repetition[lost], frequency[lost], presence[lost] = 1.0, 0.0, 0.0
        sampling = replace(
            sampling,
            repetition_penalties=repetition,
            frequency_penalties=frequency,
            presence_penalties=presence,
        )
        return replace(sampling, any_penalty=bool(has_penalty(sampling).any())), lost

    def _note(self, error: BaseException) -> None:
        """Log a lack of memory; raise any other error again."""
        if not is_out_of_memory(error):
            raise error
        log.warning("short of memory beside the model: %s", shortage(error, self._pool.device))


_NOBODY: Ints = np.empty(0, np.int64)


def _exhausted(batch: ScheduleBatch, places: Ints, trial: Tried | None) -> Exhausted:
    if not len(places):
        return NO_ROWS
    rows = places if trial is None else np.unique(trial.row_of[places])
    return Exhausted(batch.sample_rows[rows], batch.sample_generations[rows])
