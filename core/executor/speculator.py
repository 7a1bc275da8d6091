"""Takes drafts from one step to the next through the FutureMap, and what they need around a step.

A step reads the drafts behind its decode rows, and computes as many as plan and limit leave room for (`trial`). Once
its tokens are sampled, new drafts go beside them into the relay (`drafted`): after publish, so that a reader of lengths
never waits for drafts (law 9).
"""

from __future__ import annotations

import numpy as np
import torch

from core.batch.schedule_batch import ScheduleBatch
from core.executor.device_state import DeviceState
from core.speculation.drafter import DRAFT_LEN, DRAFTS, Drafter, Drafts, Ran
from core.speculation.trial import Trial, Verdict
from core.types.arrays import Ints


class Speculator:
    """Forward thread only. Reads the device's memory in place, so it is for the CPU."""

    def __init__(self, drafter: Drafter, state: DeviceState) -> None:
        assert state.streams.device.type == "cpu", "drafts are read in place"
        assert not drafter.needs_hidden, "no model gives hidden states to drafters yet"
        self._drafter = drafter
        self._map = state.future_map
        self._vocab_size = state.model.spec.vocab_size
        self._width = self._map.buffer(DRAFTS).shape[1]

    def begin(self, batch: ScheduleBatch) -> None:
        """Tell the drafter of new owners."""
        self._drafter.begin(batch)

    def trial(self, batch: ScheduleBatch, rows: torch.Tensor, newest: torch.Tensor, lens: torch.Tensor) -> Trial:
        """What `batch` computes of its decode rows: int64[n] rows, newest tokens, and tokens in the pools."""
        assert batch.spec is not None, "a step verifies drafts by plan"
        drafts = Drafts(self._map.extra(DRAFTS, rows).numpy(), self._map.extra(DRAFT_LEN, rows).numpy())
        before = lens.numpy()
        room = np.minimum(batch.spec.drafts, batch.spec.limits - before - 1)
        return Trial.of(newest.numpy(), before, drafts, room, self._vocab_size)

    def drafted(
        self, batch: ScheduleBatch, lens: torch.Tensor, tokens: torch.Tensor, verdict: Verdict | None
    ) -> dict[str, torch.Tensor]:
        """Columns of the relay for the S rows that sampled. Written in every step: drafts that are left would be stale.

        `lens`, int64[S]: tokens of each in the pools. `tokens`: all that were sampled, one for each row or, with a
        verdict, for each place.
        """
        assert batch.spec is not None, "speculation is on"
        rows, found = batch.sample_rows, tokens.numpy()
        counts: Ints = np.ones(len(rows), np.int64)
        if verdict is not None:
            counts, found = verdict.counts, found[verdict.kept]
        ids: Ints = np.full((len(rows), self._width), -1, np.int64)
        draft_lens: Ints = np.zeros(len(rows), np.int64)
        most = min(batch.spec.propose, self._width)
        if len(rows):
            drafts = self._drafter.draft(Ran(rows, lens.numpy(), counts, found), most)
            ids[:, : drafts.ids.shape[1]] = drafts.ids
            draft_lens = drafts.lens
        return {DRAFTS: torch.from_numpy(ids), DRAFT_LEN: torch.from_numpy(draft_lens)}
