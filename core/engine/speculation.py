"""What speculation is made of, and which engines cannot have it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from core.engine.build_pools import Pools
from core.models.base import ModelSpec
from core.relay.payload import Column
from core.scheduler.draft_depth import Depth
from core.speculation.drafter import Drafter, draft_columns


@dataclass(frozen=True, slots=True)
class Speculation:
    """`drafter` guesses tokens, up to `most` behind each; `depth` says how many of them a step verifies."""

    drafter: Drafter
    depth: Depth
    most: int

    @property
    def columns(self) -> tuple[Column, ...]:
        """Columns of the FutureMap that it needs."""
        return (*draft_columns(self.most), *self.drafter.columns)


def why_no_speculation(spec: ModelSpec, pools: Pools, device: torch.device) -> str | None:
    """Why an engine cannot verify drafts, as the end of a sentence; None if it can."""
    if device.type != "cpu":
        return f"drafts are verified on the CPU, and the model is on {device.type}"
    if spec.encoder is not None:
        return "encoder-decoders are not speculated with"
    if spec.state_layers:
        return "a recurrent state cannot go back behind a wrong draft"
    if pools.companions:
        return f"{', '.join(sorted(pools.companions))}: pools beside the KV pages do not take drafts"
    return None
