"""Log probabilities of the model itself: from the raw logits, before bias, penalties, temperature and filters."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from core.sampling.candidates import largest
from core.sampling.cutoff import ordered_keys


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log probabilities of S rows, on the device."""

    values: torch.Tensor
    """float32[S]: log probability of each sampled token."""
    top_ids: torch.Tensor | None
    """int64[S, K]: the most likely tokens, best first, lower ids first among equals; None when no row wants any."""
    top_values: torch.Tensor | None
    """float32[S, K]."""


def raw_logprobs(logits: torch.Tensor) -> torch.Tensor:
    """float32[S, V] over the full vocabulary; a copy, so the sampler may change the logits afterwards."""
    # On the CPU this is faster than logsumexp and a gather, and works row by row, so rows are independent.
    return logits.log_softmax(-1)


def pick_logprobs(logprobs: torch.Tensor, tokens: torch.Tensor, top_ids: torch.Tensor | None) -> Logprobs:
    """Pick from `logprobs`, float32[S, V], those of the sampled `tokens`, int64[S], and those of `top_ids`."""
    values = logprobs.gather(1, tokens[:, None])[:, 0]
    return Logprobs(values, top_ids, None if top_ids is None else logprobs.gather(1, top_ids))


def leading_ids(logprobs: torch.Tensor, count: int) -> torch.Tensor:
    """int64[S, K]: ids by falling value, then rising id, K the smaller of `count` and V.

    `topk` leaves open which of several equal values it lists. That can change with its K, which depends on the other
    rows, and bfloat16 models often produce such ties. So value and id are ranked as one number.
    """
    keys = ordered_keys(logprobs).long() << 32
    keys += torch.arange(logprobs.shape[1] - 1, -1, -1, device=logprobs.device)
    best, _ = largest(keys, min(count, logprobs.shape[1]))
    return logprobs.shape[1] - 1 - (best & 0xFFFFFFFF)
