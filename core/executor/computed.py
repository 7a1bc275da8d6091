"""What a step has made: on the device, and what of it comes to the host beside tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from core.batch.forward_batch import ForwardBatch
from core.batch.schedule_batch import ScheduleBatch
from core.device.timer import Mark
from core.executor.decode_graphs import DecodeInputs
from core.executor.scorer import Scores
from core.executor.step_lanes import StepLanes
from core.speculation.verification import Tried


@dataclass(frozen=True, slots=True)
class Computed:
    """What the model made of a step."""

    inputs: ForwardBatch | DecodeInputs
    logits: torch.Tensor
    """float32[S, V]; float32[T, V] where drafts are verified."""
    vectors: torch.Tensor | None = None
    """Vectors of embeddings, float32[E, H]; None without any, or without memory for them."""
    trial: Tried | None = None
    """What is verified; None without drafts."""
    sampled: torch.Tensor | None = None
    """int64[S]: which of the rows sample, where those are not all; replays have found them themselves."""
    scores: Scores | None = None
    """Of prompt tokens that are told; None without any, or without memory for them."""


@dataclass(frozen=True, slots=True)
class Begun:
    """A step of which the first half has been launched."""

    batch: ScheduleBatch
    began: Mark
    """As in `LaunchedStep`, and `lanes` too."""
    lanes: StepLanes | None
    done: Computed
    counted: torch.Tensor
    """`DeviceChecks.snapshot` of its decode rows."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """What came to the host beside tokens; None as in `Computed`."""

    vectors: torch.Tensor | None
    scores: Scores | None
