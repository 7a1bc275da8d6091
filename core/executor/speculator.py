"""Takes drafts from one step to the next through the FutureMap, and what they need around a step.

A step reads the drafts behind its decode rows, and computes as many as plan and limit leave room for (`trial`). Once
its tokens are sampled, new drafts go beside them into the relay (`drafted`): after publish, so that a reader of lengths
never waits for drafts (law 9).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import numpy as np
import torch

from core.batch.forward_batch import ForwardBatch
from core.batch.hidden import HiddenRequest
from core.batch.result import Published
from core.batch.schedule_batch import ForwardMode, ScheduleBatch
from core.device.event import Event
from core.device.staging import Staging
from core.executor.device_state import DeviceState
from core.relay.resolve import DecodeRows, ResolvedInputs
from core.sampling.sampler import SampleOutput
from core.speculation.compiled_trial import CompiledTrial
from core.speculation.drafter import DRAFT_LEN, DRAFTS, Computed, Drafter, Drafts, Ran, Rehearsing
from core.speculation.trial import Trial
from core.speculation.verification import Outcome, Tried
from core.types.arrays import Bools, Ints

MOST_UNHEARD: Final = 16
"""Steps that a drafter hears of together, where nothing is drafted behind them: each call takes 10 us of a step."""


class Speculator:
    """A `Verification`. Reads the device's memory in place, so it is for the CPU."""

    def __init__(self, drafter: Drafter, state: DeviceState) -> None:
        assert state.streams.device.type == "cpu", "drafts are read in place"
        self._drafter = drafter
        self._state = state
        self._map = state.future_map
        self._vocab_size = state.model.spec.vocab_size
        self._width = self._map.buffer(DRAFTS).shape[1]
        self._left: Bools = np.zeros(self._map.num_rows, np.bool_)
        """By row: whether its last step left drafts."""
        self._any_left = False
        """Whether one of these may be set: steps without drafts need not look for which."""
        self._one_each: Ints = np.ones(self._map.num_rows, np.int64)
        # Parts of it are kept by drafters.
        self._one_each.flags.writeable = False
        self._unheard: list[tuple[Ints, Ints, Ints]] = []
        """Rows, lengths and one token each, of steps that the drafter has not heard of."""

    @property
    def needs_hidden(self) -> HiddenRequest:
        """Which hidden states the model must give in every step."""
        return self._drafter.needs_hidden

    def rehearse(self, forward: ForwardBatch) -> None:
        """See `Verification`."""
        if isinstance(self._drafter, Rehearsing):
            self._drafter.rehearse(forward, self._map)

    def begin(self, batch: ScheduleBatch) -> None:
        """See `Verification`: no step is a grid."""
        if len(batch.fresh_rows):
            self._catch_up()
        self._drafter.begin(batch)

    def trial(self, batch: ScheduleBatch, decode: DecodeRows, inputs: ResolvedInputs, staging: Staging) -> Trial | None:
        """See `Verification`."""
        assert batch.spec is not None, "speculation is on"
        # Where no row can have any the relay is not asked: steps of few tokens would feel it.
        if not batch.verifies or not self._any_left:
            return None
        lens = self._map.extra(DRAFT_LEN, decode.rows).numpy()
        if np.count_nonzero(lens) == 0:
            return None
        drafts = Drafts(self._map.extra(DRAFTS, decode.rows).numpy(), lens)
        before = inputs.decode_lens.numpy()
        room = np.minimum(batch.spec.drafts, batch.spec.limits - before - 1)
        asked = inputs.ids.numpy(), before, drafts, room, self._vocab_size
        module = self._state.host_code.module
        found = Trial.of(*asked) if module is None else CompiledTrial.laid_out(module, *asked)
        return found if len(found.ids) > len(before) else None

    def forward_batch(self, batch: ScheduleBatch, decode: DecodeRows, trial: Tried) -> ForwardBatch:
        """See `Verification`: for each row its newest token, and drafts behind it."""
        assert isinstance(trial, Trial), "it came from here"
        return ragged_batch(self._state, batch, decode, trial, self.needs_hidden)

    def host_lens(self, batch: ScheduleBatch, inputs: ResolvedInputs) -> tuple[Ints, Ints]:
        """See `Verification`."""
        return host_lens(batch, inputs)

    def tell(self, batch: ScheduleBatch, outcome: Outcome | None, told: Callable[[Published], None]) -> None:
        """See `Verification`: they are known."""
        if batch.verifies:
            told(published(batch, outcome))

    def drafts_behind(self, batch: ScheduleBatch) -> bool:
        """See `Verification`."""
        return batch.spec is not None and batch.spec.aim.most > 0

    def on_their_way(self, batch: ScheduleBatch, host: SampleOutput, copy_done: Event, outcome: Outcome | None) -> None:
        """See `Verification`: the drafter has heard of them."""

    def drafted(
        self,
        batch: ScheduleBatch,
        forward: ForwardBatch | None,
        lens: torch.Tensor,
        tokens: torch.Tensor,
        outcome: Outcome | None,
    ) -> dict[str, torch.Tensor]:
        """See `Verification`."""
        assert batch.spec is not None, "speculation is on"
        rows, aim = batch.sample_rows, batch.spec.aim
        runs_model = self._drafter.runs_model
        if not runs_model and outcome is None and (aim.most == 0 or len(rows) == 0):
            return self._overhear(rows, lens, tokens)
        self._catch_up()
        found = tokens.numpy()
        if outcome is None:
            counts = self._one_each[: len(rows)]
        else:
            counts, found = outcome.counts, found[outcome.kept]
        computed = None
        if runs_model:
            assert forward is not None, "the CPU captures no steps"
            kept = None if outcome is None else outcome.kept
            computed = Computed(forward, batch.rows, kept, batch.sampling, self._map)
        ran = Ran(rows, lens.numpy(), counts, found, computed)
        if aim.most == 0 or len(rows) == 0:
            self._drafter.hear(ran)
            return self._nothing(rows)
        drafts = self._drafter.draft(ran, aim if aim.most <= self._width else replace(aim, most=self._width))
        if np.count_nonzero(drafts.lens) == 0:
            return self._nothing(rows)
        self._left[rows], self._any_left = drafts.lens > 0, True
        ids = drafts.ids
        if ids.shape[1] < self._width:
            ids = np.full((len(rows), self._width), -1, np.int64)
            ids[:, : drafts.ids.shape[1]] = drafts.ids
        return {DRAFTS: torch.from_numpy(ids), DRAFT_LEN: torch.from_numpy(drafts.lens)}

    def _overhear(self, rows: Ints, lens: torch.Tensor, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        """As `drafted`, for a step that gave each of S `rows` one token, and behind which no drafts are wanted."""
        if len(rows) == 0:
            return {}
        self._unheard.append((rows, lens.numpy(), tokens.numpy()))
        if len(self._unheard) >= MOST_UNHEARD:
            self._catch_up()
        return self._nothing(rows)

    def _catch_up(self) -> None:
        """Tell the drafter of the steps that it has not heard of."""
        if not self._unheard:
            return
        rows, lens, tokens = zip(*self._unheard, strict=True)
        self._unheard.clear()
        each, lens_of, newest = (np.concatenate(part) for part in (rows, lens, tokens))
        self._drafter.hear(Ran(each, lens_of, np.ones_like(each), newest))

    def _nothing(self, rows: Ints) -> dict[str, torch.Tensor]:
        """Columns of the relay for `rows`, int64[S], behind which there are no drafts."""
        if not self._any_left or np.count_nonzero(self._left[rows]) == 0:
            return {}
        self._left[rows] = False
        self._any_left = bool(np.count_nonzero(self._left))
        return {DRAFT_LEN: torch.zeros(len(rows), dtype=torch.int64)}


def ragged_batch(
    state: DeviceState, batch: ScheduleBatch, decode: DecodeRows, trial: Trial, needs: HiddenRequest
) -> ForwardBatch:
    """What the model runs over for `trial`, where the host's memory is the device's."""
    slots = state.pool.slots_on_host(batch.rows[trial.row_of], trial.positions)
    ids, positions, slots_of, seq_lens, last = state.staging.upload(
        [trial.ids, trial.positions, slots, trial.lens + trial.counts, np.arange(len(trial.ids))]
    )
    return ForwardBatch(
        # To a model they are chunks, each behind what is in the pools.
        mode=ForwardMode.EXTEND,
        input_ids=ids,
        positions=positions,
        rows=decode.rows,
        seq_lens=seq_lens,
        out_cache_loc=slots_of,
        last_indices=last,
        req_to_token=state.pool.table,
        kv_pool=state.kv_pool,
        num_extend=len(trial.lens),
        prefix_lens_host=trial.lens,
        extend_lens_host=trial.counts,
        verifies=True,
        wants_hidden=needs.final,
        wants_layers=needs.layers,
    )


def host_lens(batch: ScheduleBatch, inputs: ResolvedInputs) -> tuple[Ints, Ints]:
    """See `Verification`. The plan knows bounds, which drafts of the step before have set apart."""
    if batch.spec is not None and batch.spec.exact:
        return batch.prefix_lens, batch.extend_lens
    prefix_lens, chunks, known = batch.prefix_lens, batch.num_extend, inputs.decode_lens.numpy()
    prefix_lens = np.concatenate([prefix_lens[:chunks], known]) if chunks else known
    return prefix_lens, np.minimum(batch.extend_lens, 1) if batch.verifies else batch.extend_lens


def published(batch: ScheduleBatch, outcome: Outcome | None) -> Published:
    """How far a step that was let verify drafts came; it may have found none. It has no prompts beside them."""
    assert batch.spec is not None, "it verifies drafts"
    counts = np.ones(len(batch.rows), np.int64) if outcome is None else outcome.counts
    return Published(batch.step_id, batch.sample_rows, batch.sample_generations, counts, batch.spec.drafts + 1)
