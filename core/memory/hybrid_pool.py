"""Request rows and recurrent states side by side: the device table from request row to state slot.

Has a `ReqToTokenPool` and a `MambaPool`, and is neither: SGLang's HybridReqToTokenPool without its inheritance.
"""

from __future__ import annotations

import torch

from core.device.recorder import Recorder
from core.device.staging import Staging
from core.memory.mamba_pool import MambaPool
from core.memory.req_to_token_pool import ReqToTokenPool
from core.memory.state_slots import NAME, StateWrites


class HybridReqToTokenPool:
    """Device side of the "mamba" companion. Row 0 maps to slot 0 for ever, so padded rows land in padding."""

    def __init__(self, requests: ReqToTokenPool, states: MambaPool) -> None:
        self.states = states
        self.recorder: Recorder | None = None
        # Exactly as long as the request table, whatever the number of slots (review of SGLang #24243).
        self.mapping = requests.new_row_buffer((), torch.int64)
        self.step_slots = torch.zeros(0, dtype=torch.int64, device=requests.device)
        """int64[B]: slots of the current step's rows, in batch order."""

    def begin(self, rows: torch.Tensor, writes: StateWrites | None, staging: Staging) -> None:
        """See `DeviceCompanion`. What a slot's former owner left is cleared here, behind its last write."""
        if writes is not None:
            fresh, slots = staging.upload([writes.rows, writes.slots])
            self.mapping[fresh] = slots
            self.states.clear(slots)
        self.step_slots = self.mapping[rows]
        if self.recorder is not None:
            self.recorder.wrote(NAME, self.step_slots)
