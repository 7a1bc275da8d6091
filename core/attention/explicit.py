"""Softmax attention written out, for what fused kernels do not offer: capped scores and attention sinks."""

from __future__ import annotations

import torch

MAX_SCORES = 1 << 23
"""Scores held at a time (32 MiB of float32): long prefills are computed in blocks of queries."""


def explicit_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """[N, G, Q, Dv] in q's dtype, computed in float32, from q [N, G, Q, D], k [N, G or 1, L, D], v [N, G or 1, L, Dv].

    `mask` is additive and broadcasts to the scores [N, G, Q, L]. `sinks` broadcasts to [N, G, Q, 1]: one more logit per
    row of the softmax whose probability is thrown away (gpt-oss; Xiao et al., "attention sinks").
    """
    keys, values = k.float(), v.float()
    queries = q.float() * scale
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    block = max(1, MAX_SCORES // max(1, q.shape[0] * q.shape[1] * k.shape[-2]))
    for low in range(0, q.shape[-2], block):
        rows = slice(low, low + block)
        scores = torch.matmul(queries[..., rows, :], keys.transpose(-1, -2))
        if softcap is not None:
            scores = scores.div_(softcap).tanh_().mul_(softcap)
        if mask is not None:
            scores += mask[..., rows, :] if mask.shape[-2] > 1 else mask
        sink = None if sinks is None else (sinks[..., rows, :] if sinks.shape[-2] > 1 else sinks)
        out[..., rows, :] = torch.matmul(_softmax(scores, sink), values)
    return out


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Softmax over the last dimension with an extra logit in the denominator. Overwrites `scores`."""
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    peak = scores.amax(dim=-1, keepdim=True)
    weights = scores.sub_(peak).exp_()
    # A sink far above all scores overflows, and an infinite denominator makes the row zero: the right answer.
    return weights.div_(weights.sum(dim=-1, keepdim=True) + (sinks.float() - peak).exp())
