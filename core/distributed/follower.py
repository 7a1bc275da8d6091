"""The other ranks: they run what the leader runs, on their own shards of weights, keys and values.

Followers plan nothing, sample nothing and hold no stream. Tokens come from the leader, on the device, behind the
logits of each step; so ranks cannot differ in a token, whatever their roundings. SGLang samples on every rank, and has
a setting, `SYNC_TOKEN_IDS_ACROSS_TP`, for ranks that came to differ.
"""

from __future__ import annotations

import numpy as np
import torch

from core.batch.schedule_batch import ScheduleBatch
from core.device.event import Event
from core.device.staging import Staging
from core.distributed.wire import Pin, decode
from core.distributed.world import World
from core.executor.sampling_step import SampledRows
from core.executor.step import StepRunner
from core.executor.verification import Attempt
from core.sampling.sampler import SampleOutput
from core.speculation.verification import Outcome, Tried

STOP = b""
"""The message behind which a follower ends."""


class FollowingSampling:
    """Stands where a `SamplingStep` would: leaves room for the tokens that the leader shares."""

    def compile(self, module: object) -> None:
        """Nothing is sampled here."""

    def carried(self, batch: ScheduleBatch, attempt: Attempt | None = None) -> list[np.ndarray]:
        """Nothing is uploaded for it."""
        return []

    def begin(self, batch: ScheduleBatch, staging: Staging) -> None:
        """No history, no constraints."""

    def sample(
        self, logits: torch.Tensor, batch: ScheduleBatch, lens: torch.Tensor, trial: Tried | None = None
    ) -> SampledRows:
        """Zeros, int64[S], for the tokens of S rows."""
        tokens = torch.zeros(len(lens), dtype=torch.int64, device=logits.device)
        return SampledRows(SampleOutput(tokens, torch.zeros_like(tokens, dtype=torch.bool), None, None, None))

    def append(self, rows: torch.Tensor, lens: torch.Tensor, tokens: torch.Tensor, batch: ScheduleBatch) -> None:
        """No history."""

    def on_their_way(self, batch: ScheduleBatch, host: SampleOutput, copy_done: Event, verdict: Outcome | None) -> None:
        """No grammar waits for them."""


def follow(runner: StepRunner, world: World, pin: Pin) -> None:
    """Run what the leader tells, until it says that this is all. Raises RuntimeError once the leader is gone."""
    while len(data := world.receive()):
        told = decode(data, pin)
        if isinstance(told, ScheduleBatch):
            runner.launch(told)
        else:
            runner.copy_out(told)
