"""Takes drafts from one step to the next through the FutureMap, and what they need around a step.

A step reads the drafts behind its decode rows, and computes as many as plan and limit leave room for (`trial`). Once
its tokens are sampled, new drafts go beside them into the relay (`drafted`): after publish, so that a reader of lengths
never waits for drafts (law 9).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from core.batch.forward_batch import ForwardBatch
from core.batch.hidden import HiddenRequest
from core.batch.schedule_batch import ScheduleBatch
from core.executor.device_state import DeviceState
from core.relay.resolve import DecodeRows, ResolvedInputs
from core.speculation.drafter import DRAFT_LEN, DRAFTS, Computed, Drafter, Drafts, Ran
from core.speculation.trial import Trial, Verdict
from core.types.arrays import Bools, Ints


class Speculator:
    """Forward thread only. Reads the device's memory in place, so it is for the CPU."""

    def __init__(self, drafter: Drafter, state: DeviceState) -> None:
        assert state.streams.device.type == "cpu", "drafts are read in place"
        self._drafter = drafter
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

    @property
    def needs_hidden(self) -> HiddenRequest:
        """Which hidden states the model must give in every step."""
        return self._drafter.needs_hidden

    def begin(self, batch: ScheduleBatch) -> None:
        """Tell the drafter of new owners."""
        self._drafter.begin(batch)

    def trial(self, batch: ScheduleBatch, decode: DecodeRows, inputs: ResolvedInputs) -> Trial | None:
        """What `batch` computes of its decode rows, which have these inputs; None where no row has a draft to try."""
        assert batch.spec is not None, "speculation is on"
        if not batch.verifies or not (lens := self._map.extra(DRAFT_LEN, decode.rows).numpy()).any():
            return None
        drafts = Drafts(self._map.extra(DRAFTS, decode.rows).numpy(), lens)
        before = inputs.decode_lens.numpy()
        room = np.minimum(batch.spec.drafts, batch.spec.limits - before - 1)
        found = Trial.of(inputs.ids.numpy(), before, drafts, room, self._vocab_size)
        return found if len(found.ids) > len(before) else None

    def drafted(
        self,
        batch: ScheduleBatch,
        forward: ForwardBatch,
        lens: torch.Tensor,
        tokens: torch.Tensor,
        verdict: Verdict | None,
    ) -> dict[str, torch.Tensor]:
        """Columns of the relay for the S rows that sampled; none where no drafts are left and none are new.

        `forward`: what the model ran over. `lens`, int64[S]: tokens of each in the pools. `tokens`: all that were
        sampled, one for each row or, with a verdict, for each place.
        """
        assert batch.spec is not None, "speculation is on"
        rows, found, aim = batch.sample_rows, tokens.numpy(), batch.spec.aim
        runs_model = self._drafter.runs_model
        if len(rows) == 0 and not runs_model:
            return {}
        if verdict is None:
            counts = self._one_each[: len(rows)]
        else:
            counts, found = verdict.counts, found[verdict.kept]
        ran = Ran(rows, lens.numpy(), counts, found)
        if runs_model:
            kept = None if verdict is None else verdict.kept
            ran = replace(ran, computed=Computed(forward, batch.rows, kept, batch.sampling, self._map))
        if aim.most == 0 or len(rows) == 0:
            self._drafter.hear(ran)
            return self._nothing(rows)
        drafts = self._drafter.draft(ran, aim if aim.most <= self._width else replace(aim, most=self._width))
        self._left[rows] = drafts.lens > 0
        self._any_left = self._any_left or bool(np.count_nonzero(drafts.lens))
        ids: Ints = np.full((len(rows), self._width), -1, np.int64)
        ids[:, : drafts.ids.shape[1]] = drafts.ids
        return {DRAFTS: torch.from_numpy(ids), DRAFT_LEN: torch.from_numpy(drafts.lens)}

    def _nothing(self, rows: Ints) -> dict[str, torch.Tensor]:
        """Columns of the relay for `rows`, int64[S], behind which no drafts are wanted."""
        if not self._any_left or np.count_nonzero(self._left[rows]) == 0:
            return {}
        self._left[rows] = False
        self._any_left = bool(np.count_nonzero(self._left))
        return {DRAFT_LEN: torch.zeros(len(rows), dtype=torch.int64)}
