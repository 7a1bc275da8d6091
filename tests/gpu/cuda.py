"""What all modules of this folder need: the reason to skip, streams, and a device that is slow on purpose."""

from __future__ import annotations

import pytest
import torch

from core.batch.forward_batch import ForwardBatch
from core.relay.future_map import FutureMap
from core.relay.payload import RelayPayload
from tests.proofs.happens_before.harness import CONTEXT, VOCAB
from tests.proofs.happens_before.hash_model import HashModel

ONLY_ON_CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

STALL_CYCLES = 4_000_000
"""About two milliseconds: long beside a step of the hash model, so the host is always ahead."""


class StalledModel(HashModel):
    """Holds the device before it reads KV and table: the next step is planned and submitted in the meantime."""

    def __init__(self) -> None:
        super().__init__(VOCAB, CONTEXT)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        torch.cuda._sleep(STALL_CYCLES)
        return super().forward(batch)


def stall_stash(patch: pytest.MonkeyPatch) -> None:
    """Holds the device between publication and stash: copies overtake the rest of their step."""
    stash = FutureMap.stash

    def late(self: FutureMap, rows: torch.Tensor, payload: RelayPayload) -> None:
        torch.cuda._sleep(STALL_CYCLES)
        stash(self, rows, payload)

    patch.setattr(FutureMap, "stash", late)
