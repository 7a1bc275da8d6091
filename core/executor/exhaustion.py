"""What is reported of a step for which the device had too little memory: the engine's last error, or rows that end."""

from __future__ import annotations

import numpy as np
import torch

from core.batch.result import NO_ROWS, Exhausted, StepOutOfMemory
from core.batch.schedule_batch import ScheduleBatch
from core.device.shortage import shortage


def out_of_memory(error: BaseException, batch: ScheduleBatch, device: torch.device) -> StepOutOfMemory:
    """The error that ends the engine: how much memory was missing, and what the step was."""
    return StepOutOfMemory(f"{_described(batch)} ran out of memory: {shortage(error, device)}")


def embedded(batch: ScheduleBatch) -> Exhausted:
    """The owners of all rows that have an embedding segment in the step."""
    if batch.pooling is None:
        return NO_ROWS
    places = np.isin(batch.rows, [segment.row for segment in batch.pooling.segments])
    return Exhausted(batch.rows[places], batch.generations[places])


def told_of_prompts(batch: ScheduleBatch) -> Exhausted:
    """The owners of all rows of which the step tells prompt tokens."""
    return NO_ROWS if batch.scoring is None else Exhausted(batch.scoring.rows, batch.scoring.generations)


def _described(batch: ScheduleBatch) -> str:
    sampling = batch.sampling
    options = {
        "penalties": sampling.any_penalty,
        "log probabilities": sampling.logprobs,
        f"{sampling.top_logprobs} alternatives": bool(sampling.top_logprobs),
        "chosen ids": sampling.chosen is not None,
        "filters": sampling.any_top_k or sampling.any_top_p or sampling.any_min_p,
        f"{len(sampling.constrained)} grammars": bool(len(sampling.constrained)),
        "embeddings": batch.pooling is not None,
    }
    used = ", ".join(name for name, is_used in options.items() if is_used)
    size = f"{len(batch.rows)} rows, {batch.num_tokens} tokens, {len(sampling)} sampled"
    return f"step {batch.step_id} ({batch.mode.value}: {size}{'; ' + used if used else ''})"
