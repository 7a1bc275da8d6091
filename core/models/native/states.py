"""Where native code finds the recurrent states that a step goes on from, and leaves its own."""

from __future__ import annotations

import numpy as np
import torch

from core.batch.forward_batch import ForwardBatch
from core.device.staging import Staging
from core.memory.recurrent.row_to_slot import HybridReqToTokenPool
from core.models.native.parts import StepStates
from core.types.arrays import Ints

CPU = torch.device("cpu")


class StateTable:
    """The states of one model, in `pool`, which knows what the current step does to them."""

    def __init__(self, pool: HybridReqToTokenPool) -> None:
        self._pool = pool
        layers = [layer.layer_id for layer in pool.states.layers]
        self._convs = [pool.states.conv(layer) for layer in layers]
        self._recurrents = [pool.states.recurrent(layer) for layer in layers]

    def of(self, batch: ForwardBatch) -> StepStates:
        """Of the step that the pool has begun.

        As `core.models.hf.recurrent` does it: a row goes on from its own slot and leaves its state there, a snapshot at
        each page's end that the step tracks, and one behind each place if it verifies drafts.
        """
        pool, extends = self._pool, batch.extend_lens_host
        behind: Ints = np.cumsum(extends)
        if batch.verifies:
            slots = pool.verify(extends, Staging(CPU)).slots
            return self._made(np.arange(1, len(slots) + 1), slots)
        tracked = pool.tracked
        if len(tracked.places) == 0:
            return self._made(behind, pool.step_slots)
        into = tracked.ends - batch.prefix_lens_host[tracked.places]
        ends = np.concatenate([(behind - extends)[tracked.places] + into, behind])
        order = np.argsort(ends, kind="stable")
        slots = torch.cat([pool.tracked_slots, pool.step_slots])
        return self._made(ends[order], slots[torch.from_numpy(order)])

    def _made(self, ends: Ints, slots: torch.Tensor) -> StepStates:
        return StepStates(self._pool.step_slots, torch.from_numpy(ends), slots, self._convs, self._recurrents)
