"""Request rows and recurrent states side by side: the device table from request row to state slot.

Has a `ReqToTokenPool` and a `MambaPool`, and is neither: SGLang's HybridReqToTokenPool without its inheritance.
"""

from __future__ import annotations

import torch

from core.device.recorder import Recorder
from core.device.staging import Staging
from core.memory.recurrent.state_pool import MambaPool
from core.memory.recurrent.state_slots import NAME, StateWrites, Tracked
from core.memory.req_to_token_pool import ReqToTokenPool


class HybridReqToTokenPool:
    """Device side of the "mamba" companion. Row 0 maps to slot 0 for ever, so padded rows land in padding."""

    def __init__(self, requests: ReqToTokenPool, states: MambaPool) -> None:
        self.states = states
        self.recorder: Recorder | None = None
        # Exactly as long as the request table, whatever the number of slots (review of SGLang #24243).
        self.mapping = requests.new_row_buffer((), torch.int64)
        self.step_slots = torch.zeros(0, dtype=torch.int64, device=requests.device)
        """int64[B]: slots of the current step's rows, in batch order."""
        self.tracked = Tracked()
        self.tracked_slots = self.step_slots
        """int64[n] on the device: `tracked.slots`."""
        self.tracked_from = self.step_slots
        """int64[n]: the slots of the tracked rows, from which their states are copied into `tracked_slots`."""

    def begin(self, rows: torch.Tensor, writes: object | None, staging: Staging) -> None:
        """Map new rows to their slots and set those slots' first states, then look up the slots of this step's rows.

        The one FIFO puts this after the last write of a slot's former owner (law 4).
        """
        assert writes is None or isinstance(writes, StateWrites), type(writes)
        self.tracked, places = Tracked(), rows[:0]
        self.tracked_slots = rows[:0]
        if writes is not None:
            self.tracked = writes.tracked
            fresh, slots, sources, places, self.tracked_slots = staging.upload(
                [writes.rows, writes.slots, writes.sources, writes.tracked.places, writes.tracked.slots]
            )
            if len(writes.rows):
                self.mapping[fresh] = slots
                self.states.start(slots, sources)
                if self.recorder is not None:
                    self.recorder.read(NAME, sources)
        self.step_slots = self.mapping[rows]
        self.tracked_from = self.step_slots[places]
        if self.recorder is not None:
            self.recorder.wrote(NAME, self.step_slots)
            self.recorder.wrote(NAME, self.tracked_slots)
