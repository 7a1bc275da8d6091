"""Drafts by a smaller model of the same vocabulary: speculative decoding (Leviathan et al. 2023).

The draft model runs over every token that the target runs over, for rows that are drafted for, and keeps keys and
values of its own in the same pages; so what the prefix cache finds again holds its part too. Prompts are computed with
the step that computes them. Rows that decode wait while no drafts are wanted, and are caught up with in one pass. Pages
that were computed for a row that is not drafted for, or that ended while it waited, hold nothing of the draft model:
drafts are worse for those that find them, and outputs the same.

The newest token of a row, and the drafts behind it, have no slot yet. Their keys and values go to spare slots that last
for one step. So nothing is written to a page before the target has written there.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from core.batch.forward_batch import ForwardBatch
from core.batch.hidden import NO_HIDDEN
from core.batch.schedule_batch import ForwardMode, ScheduleBatch
from core.batch.spec_plan import Aim
from core.device.shortage import MEMORY_ERRORS, is_out_of_memory
from core.memory.draft_pool import DraftPool
from core.memory.req_to_token_pool import ReqToTokenPool
from core.models.base import Model
from core.relay.future_map import FutureMap
from core.relay.payload import Column
from core.sampling.sampler import Sampler
from core.speculation.calibration import Calibration
from core.speculation.draft_text import NONE, DraftText, Follower, Guess, Piece, Run
from core.speculation.drafter import Drafts, Ran
from core.speculation.new_slots import new_slots
from core.speculation.voice import Voice
from core.types.arrays import Bools, Floats, Ints

logger = logging.getLogger(__name__)


class ModelDrafter:
    """A `Drafter` on the CPU. `model` is bound to `pool` already."""

    columns: Sequence[Column] = ()
    needs_hidden = NO_HIDDEN
    runs_model = True

    def __init__(self, model: Model, pool: DraftPool, requests: ReqToTokenPool) -> None:
        self._model = model
        self._pool = pool
        self._requests = requests
        self._sampler = Sampler(model.spec.vocab_size, requests.device)
        self._limit = model.spec.context_length
        self._text = DraftText(self._limit)
        self._calibration = Calibration(2)
        """Of greedy rows, and of those that sample at random: a draw is right less often than a first choice."""
        self._most = pool.spare.shape[1]
        # Line 0 is padding, as everywhere; the row in place i of a run has line i + 1.
        self._table = requests.new_row_buffer((requests.max_context_len + self._most,), torch.int32)

    def rehearse(self, forward: ForwardBatch, relay: FutureMap) -> None:
        """See `Rehearsing`: prompts of these lengths, as far as the draft model reads any; or one draft."""
        if int(forward.extend_lens_host.max()) <= self._limit:
            self._model.forward(replace(forward, req_to_token=self._table, kv_pool=self._pool.kv))

    def begin(self, batch: ScheduleBatch) -> None:
        """Forget former owners, of rows and of pages, and follow new ones."""
        assert batch.spec is not None, "speculation is on"
        slots = new_slots(batch)
        if len(slots):
            self._pool.clear(torch.from_numpy(slots))
        if len(batch.fresh_rows):
            self._text.begin(batch.fresh_rows, [(seed.row, seed.origin) for seed in batch.spec.seeds])

    def hear(self, ran: Ran) -> None:
        """Run over chunks of prompts; rows that decode wait."""
        chunks = self._text.chunks(ran)
        self._text.note(ran, self._calibration)
        if chunks:
            self._or_nothing(chunks, NONE)

    def draft(self, ran: Ran, aim: Aim) -> Drafts:
        """Run over what the rows have yet to compute, then draft token by token, as far as that is worth it."""
        most = min(aim.most, self._most)
        chunks = {chunk.row: chunk for chunk in self._text.chunks(ran)}
        self._text.note(ran, self._calibration)
        followed = {place: self._text.of(row) for place, row in enumerate(ran.rows.tolist())}
        pieces, at = list[Piece](), list[int]()
        for place, follower in followed.items():
            if follower is not None:
                pieces.append(_yet_to_compute(int(ran.rows[place]), follower, chunks))
                at.append(place)
        assert ran.computed is not None, "the drafter runs a model"
        said = Said(np.array(at, np.int64), most, ran.computed.sampling.temperatures > 0)
        pieces += chunks.values()
        logits = self._or_nothing(pieces, np.arange(len(at))) if pieces else None
        if logits is None or not at:
            return said.drafts(aim.least)
        for row in ran.rows[said.at].tolist():
            self._text.caught_up(row)
        try:
            self._continue(ran, aim, said, logits)
        except MEMORY_ERRORS as error:
            self._note(error)
        for place, guess in said.guesses():
            follower = followed[place]
            assert follower is not None
            follower.guess = guess
        return said.drafts(aim.least)

    def _continue(self, ran: Ran, aim: Aim, said: Said, logits: torch.Tensor) -> None:
        """Draft for the rows at `said.at`, of which `logits` are those behind the newest tokens."""
        assert ran.computed is not None
        origins: Ints = np.zeros(len(ran.rows), np.int64)
        for place in said.at.tolist():
            follower = self._text.of(int(ran.rows[place]))
            assert follower is not None
            origins[place] = follower.origin
        voice = Voice(self._sampler, ran.computed.sampling, origins)
        going, lines = said.at, np.arange(1, len(said.at) + 1)
        for place in range(said.most):
            tokens, found = voice.say(logits, going, ran.lens[going] + 1 + place)
            kinds = said.kinds[going].tolist()
            chances = [self._calibration.chance(*each) for each in zip(kinds, found.tolist(), strict=True)]
            goes_on = said.take(place, going, tokens, found, np.array(chances), aim.worth)
            # A position beyond the context of the draft model has no meaning to it.
            goes_on &= ran.lens[going] + place + 1 < self._limit
            if place + 1 == said.most or not goes_on.any():
                return
            going, lines, tokens = going[goes_on], lines[goes_on], tokens[goes_on]
            logits = self._model.forward(self._next(lines, ran.lens[going] + place + 1, tokens))

    def _or_nothing(self, pieces: Sequence[Piece], wanted: Ints) -> torch.Tensor | None:
        """float32[S, V]: logits behind the last tokens of the pieces at `wanted`; None where memory is short."""
        try:
            return self._model.forward(self._whole(Run.of(pieces), wanted))
        except MEMORY_ERRORS as error:
            self._note(error)
            return None

    def _whole(self, run: Run, wanted: Ints) -> ForwardBatch:
        """The pass over `run`. Lays out the table: the pages of each row, and at `wanted` spare slots behind them."""
        ends, table = run.starts + run.counts, self._table
        longest, rows = int(ends.max()), len(run.rows)
        lines = torch.arange(1, rows + 1)
        source = self._requests.table[:, : min(longest, self._requests.max_context_len)]
        table[1 : rows + 1, : source.shape[1]] = source.index_select(0, torch.from_numpy(run.rows))
        # From the newest token on, which ends the run of a row that has sampled.
        behind = ends[wanted, None] - 1 + np.arange(self._most)
        table.numpy()[wanted[:, None] + 1, behind] = self._pool.spare.numpy()[wanted]
        slots = table.numpy()[run.row_of + 1, run.positions].astype(np.int64)
        ids, positions, seq_lens, out, last = map(
            torch.from_numpy, (run.ids, run.positions, ends, slots, np.cumsum(run.counts)[wanted] - 1)
        )
        return ForwardBatch(
            mode=ForwardMode.EXTEND,
            input_ids=ids,
            positions=positions,
            rows=lines,
            seq_lens=seq_lens,
            out_cache_loc=out,
            last_indices=last,
            req_to_token=table,
            kv_pool=self._pool.kv,
            num_extend=rows,
            prefix_lens_host=run.starts,
            extend_lens_host=run.counts,
        )

    def _next(self, lines: Ints, lens: Ints, tokens: Ints) -> ForwardBatch:
        """The pass over one draft of each row: `tokens` at `lens`, of the rows at these `lines`; int64[n] each."""
        slots = self._table.numpy()[lines, lens].astype(np.int64)
        ids, positions, rows, out = map(torch.from_numpy, (tokens, lens, lines, slots))
        return ForwardBatch(
            mode=ForwardMode.DECODE,
            input_ids=ids,
            positions=positions,
            rows=rows,
            seq_lens=positions + 1,
            out_cache_loc=out,
            last_indices=torch.arange(len(lines)),
            req_to_token=self._table,
            kv_pool=self._pool.kv,
            num_extend=0,
            prefix_lens_host=lens,
            extend_lens_host=np.ones(len(lines), np.int64),
        )

    def _note(self, error: BaseException) -> None:
        """Log a lack of memory, for which there are no drafts; raise any other error again."""
        if not is_out_of_memory(error):
            raise error
        logger.warning("no drafts in a step, for lack of memory")


class Said:
    """Drafts of S rows, as they come."""

    def __init__(self, at: Ints, most: int, hot: Bools) -> None:
        """`at`, int64[n]: which of the rows are drafted for. `hot`, bool[S]: those that sample at random."""
        rows = len(hot)
        self.at = at
        self.most = most
        self.kinds = hot.astype(np.int64)
        self._ids: Ints = np.full((rows, most), -1, np.int64)
        self._lens: Ints = np.zeros(rows, np.int64)
        self._counts: Ints = np.zeros(rows, np.int64)
        self._chances = np.ones(rows)
        self._probabilities = np.zeros((rows, most))
        self._expected = 0.0

    def take(self, place: int, at: Ints, tokens: Ints, found: Floats, chances: np.ndarray, worth: float) -> Bools:
        """The drafts `tokens` of the rows `at`, int64[n] both, with these probabilities. Returns bool[n]: worth it."""
        self._ids[at, place], self._probabilities[at, place] = tokens, found
        self._chances[at] *= chances
        self._counts[at] = place + 1
        worthy: Bools = self._chances[at] >= worth
        self._lens[at] += worthy
        self._expected += float(self._chances[at[worthy]].sum())
        return worthy

    def drafts(self, least: float) -> Drafts:
        """Those that are worth their time; none where fewer than `least` of all are expected to be right."""
        return Drafts(self._ids, self._lens if self._expected >= least else np.zeros_like(self._lens))

    def guesses(self) -> list[tuple[int, Guess]]:
        """By row, all that was said, to be judged."""
        return [
            (
                place,
                Guess(
                    kind=int(self.kinds[place]),
                    probabilities=self._probabilities[place, :count].tolist(),
                    ids=self._ids[place, :count].tolist(),
                ),
            )
            for place in self.at.tolist()
            if (count := int(self._counts[place]))
        ]


def _yet_to_compute(row: int, follower: Follower, chunks: dict[int, Piece]) -> Piece:
    """The tokens of `row` up to its newest one; takes its chunk out of `chunks`."""
    chunk = chunks.pop(row, None)
    waiting: Ints = np.array(follower.waiting, np.int64)
    if chunk is None:
        return Piece(row, follower.done, waiting)
    return Piece(row, chunk.start, np.concatenate([chunk.ids, waiting]))
