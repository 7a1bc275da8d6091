"""Drafts by a head that reads what inner layers of the target said: EAGLE-3 (Li et al. 2025).

The head runs over every token that the target computes, prompts included, and keeps keys and values of its own in the
same pages. So what the prefix cache finds again holds the head's part too. Two kinds of places are not as a run from
the start would leave them: the last one before a hit, if another token followed there, and places that were computed
for a row in the middle of a prompt that is not drafted for. Drafts are somewhat worse there, and outputs the same.

Behind the newest token the head feeds on its own output, token by token, in spare slots that last for one step.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch

from core.batch.forward_batch import ForwardBatch
from core.batch.hidden import HiddenRequest
from core.batch.schedule_batch import ScheduleBatch
from core.batch.spec_plan import Aim
from core.device.shortage import MEMORY_ERRORS, is_out_of_memory
from core.memory.draft_pool import DraftPool
from core.models.eagle.head import HeadStep
from core.relay.future_map import FutureMap
from core.relay.payload import Column
from core.sampling.sampler import Sampler
from core.speculation.calibration import Calibration
from core.speculation.draft_text import Guess
from core.speculation.drafter import Computed, Drafts, Ran
from core.speculation.eagle_places import HeadPlaces, Known, Waiting, states_of
from core.speculation.head_chain import ChainRun, HeadChain
from core.speculation.model_drafter import Said
from core.speculation.new_slots import new_slots
from core.speculation.voice import Voice
from core.types.arrays import Bools, Ints

logger = logging.getLogger(__name__)


class EagleDrafter:
    """A `Drafter` on the CPU."""

    runs_model = True

    def __init__(
        self,
        chain: HeadChain,
        reads: HiddenRequest,
        target_ids: torch.Tensor | None,
        pool: DraftPool,
        sampler: Sampler,
        width: int,
    ) -> None:
        """`reads`: what the first head is fed with. `target_ids`: of its weights. `width`: of the longest row."""
        self.needs_hidden = reads
        self.columns: Sequence[Column] = chain.columns
        self._chain = chain
        self._target_ids = target_ids
        self._pool = pool
        self._sampler = sampler
        rows, self._most = pool.spare.shape
        self._table = torch.zeros((rows, width + self._most), dtype=torch.int32)
        """Where the rows of one step are, with their spare slots behind them."""
        self._known: dict[int, Known] = {}
        self._guesses: dict[int, Guess] = {}
        self._calibration = Calibration(2)
        """Of greedy rows, and of those that sample at random: a draw is right less often than a first choice."""
        self._waiting = Waiting()

    def rehearse(self, forward: ForwardBatch, relay: FutureMap) -> None:
        """See `Rehearsing`: each head over all places, and the last one over what it made of them."""
        counts = forward.extend_lens_host
        rows, lines = np.zeros_like(counts), np.arange(len(counts))
        given = forward.input_ids, states_of(forward), forward.positions, forward.out_cache_loc
        places = HeadPlaces(rows, forward.prefix_lens_host, counts, *given)
        run, features = self._chain.over(places, forward.req_to_token, relay), torch.empty(0)
        for number in range(len(self._chain)):
            features = run.next(lines, rows if number else None)[1]
        # The table names slot 0 until rows are drafted for.
        self._chain.last.run(self._next(lines, counts, rows, features))

    def begin(self, batch: ScheduleBatch) -> None:
        """Forget former owners, of rows and of pages, and note what is known of new ones."""
        assert batch.spec is not None, "speculation is on"
        slots = new_slots(batch)
        if len(slots):
            self._pool.clear(torch.from_numpy(slots))
        if len(batch.fresh_rows) == 0:
            return
        for row in batch.fresh_rows.tolist():
            self._known.pop(row, None)
            self._guesses.pop(row, None)
        if self._waiting:
            self._waiting.forget(batch.fresh_rows)
        for seed in batch.spec.seeds:
            self._known[seed.row] = Known(seed.ids, seed.origin)

    def hear(self, ran: Ran) -> None:
        """Run over chunks of prompts; rows that decode wait, since the head would take its time of their step."""
        self._judge(ran)
        assert ran.computed is not None, "the drafter runs a model"
        places = HeadPlaces.of(ran, self._known)
        chunks = ran.computed.forward.num_extend if ran.computed.kept is None else 0
        is_chunk: Bools = np.arange(len(places.rows)) < chunks
        if not is_chunk.all():
            self._waiting.add(places.of_rows(~is_chunk))
        if is_chunk.any():
            try:
                self._over(places.of_rows(is_chunk), ran.computed).finish()
            except MEMORY_ERRORS as error:
                _note(error)

    def draft(self, ran: Ran, aim: Aim) -> Drafts:
        """Run over what the step ran, then draft token by token, as far as that is worth it."""
        self._judge(ran)
        assert ran.computed is not None, "the drafter runs a model"
        places, rows = HeadPlaces.of(ran, self._known), ran.rows.tolist()
        if self._waiting:
            places = self._waiting.before(places)
        at = np.array([place for place, row in enumerate(rows) if row in self._known], np.int64)
        said = Said(at, min(aim.most, self._most), ran.computed.sampling.temperatures > 0)
        wanted: Ints = np.arange(len(at))
        if len(at) != len(places.rows):
            wanted = np.flatnonzero(np.isin(places.rows, ran.rows[at]))
        run = self._over(places, ran.computed)
        try:
            if len(at):
                self._say(ran, aim, said, run, wanted)
            run.finish()
        except MEMORY_ERRORS as error:
            _note(error)
        for place, guess in said.guesses():
            self._guesses[rows[place]] = guess
        return said.drafts(aim.least)

    def _over(self, places: HeadPlaces, computed: Computed) -> ChainRun:
        return self._chain.over(places, computed.forward.req_to_token, computed.relay)

    def _say(self, ran: Ran, aim: Aim, said: Said, run: ChainRun, wanted: Ints) -> None:
        """Draft for the rows at `said.at`, which are the rows `wanted` of `run`; int64[n] both."""
        assert ran.computed is not None
        origins: Ints = np.zeros(len(ran.rows), np.int64)
        origins[said.at] = [self._known[row].origin for row in ran.rows[said.at].tolist()]
        voice, heads = Voice(self._sampler, ran.computed.sampling, origins), len(self._chain)
        going, lines, features = said.at, np.arange(len(said.at)), torch.empty(0)
        tokens: Ints | None = None
        for place in range(said.most):
            if place < heads:
                logits, features = run.next(wanted[lines], tokens)
            else:
                assert tokens is not None
                if place == heads:
                    self._lay_out(ran, said.at)
                step = self._next(lines, ran.lens[going] + place - heads, tokens, features)
                logits, features = self._chain.last.run(step)
            tokens, found = voice.say(self._of_target(logits), going, ran.lens[going] + place + 1)
            kinds = said.kinds[going].tolist()
            chances = [self._calibration.chance(*each) for each in zip(kinds, found.tolist(), strict=True)]
            goes_on = said.take(place, going, tokens, found, np.array(chances), aim.worth)
            if not goes_on.any():
                return
            if not goes_on.all():
                going, lines, tokens = going[goes_on], lines[goes_on], tokens[goes_on]
                features = features[torch.from_numpy(goes_on)]

    def _next(self, lines: Ints, at: Ints, tokens: Ints, features: torch.Tensor) -> HeadStep:
        """The pass over one draft of each of the rows at `lines`: behind the places `at`; int64[n] each."""
        return HeadStep(
            ids=torch.from_numpy(tokens),
            features=features,
            positions=torch.from_numpy(at),
            slots=torch.from_numpy(self._table.numpy()[lines, at].astype(np.int64)),
            rows=torch.from_numpy(lines),
            prefixes=at,
            extends=np.ones(len(at), np.int64),
            wanted=torch.arange(len(at)),
            table=self._table,
        )

    def _lay_out(self, ran: Ran, at: Ints) -> None:
        """Make the table of the step for the rows `at`: the pages of each, and spare slots from its newest token on."""
        assert ran.computed is not None
        lens, count = ran.lens[at], len(at)
        longest = int(lens.max())
        lines = ran.computed.forward.req_to_token.index_select(0, torch.from_numpy(ran.rows[at]))
        self._table[:count, :longest] = lines[:, :longest]
        behind = lens[:, None] + np.arange(self._most)
        self._table.numpy()[np.arange(count)[:, None], behind] = self._pool.spare[:count].numpy()

    def _of_target(self, logits: torch.Tensor) -> torch.Tensor:
        """float32[n, V] of `logits`, float32[n, Vd]."""
        if self._target_ids is None:
            return logits
        wide = logits.new_full((len(logits), self._sampler.vocab_size), -torch.inf)
        wide[:, self._target_ids] = logits
        return wide

    def _judge(self, ran: Ran) -> None:
        """Learn from what came in the places of drafts."""
        if not self._guesses:
            return
        tokens, at = ran.tokens.tolist(), 0
        for row, count in zip(ran.rows.tolist(), ran.counts.tolist(), strict=True):
            guess = self._guesses.pop(row, None)
            if guess is not None:
                self._calibration.judge(*guess, tokens[at : at + count])
            at += count


def _note(error: BaseException) -> None:
    """Log a lack of memory, for which there are no drafts; raise any other error again."""
    if not is_out_of_memory(error):
        raise error
    logger.warning("no drafts in a step, for lack of memory")
