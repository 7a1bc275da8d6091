"""A draft head computed by torch's own operations: where there is no native code, and what that is compared with."""

from __future__ import annotations

import torch
from torch.nn import functional

from core.memory.kv_pool import KVPool
from core.models.eagle.head import HeadStep
from core.models.eagle.weights import HeadWeights


class PlainHead:
    """A `Head`; sequences attend one after another."""

    def __init__(self, weights: HeadWeights, pool: KVPool) -> None:
        self._weights = weights
        self._keys, self._values = (side(pool.layers[0].layer_id) for side in (pool.k, pool.v))

    def run(self, step: HeadStep) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Head`."""
        weights = self._weights
        x = step.features
        if x.shape[1] != weights.fc.shape[0]:
            x = functional.linear(x, weights.fc)
        embedded = functional.embedding(step.ids, weights.embedding)
        both = torch.cat([self._norm(embedded, weights.embedding_norm), self._norm(x, weights.feature_norm)], -1)
        x = x + functional.linear(self._attended(both, step), weights.out)
        gate, up = functional.linear(self._norm(x, weights.mlp_norm), weights.gate_up).chunk(2, -1)
        x = x + functional.linear(functional.silu(gate) * up, weights.down)
        said = self._norm(x.index_select(0, step.wanted), weights.final_norm)
        return functional.linear(said, weights.lm_head).float(), x

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, weight.shape, weight, self._weights.eps)

    def _attended(self, both: torch.Tensor, step: HeadStep) -> torch.Tensor:
        """[T, heads * D]: what each place found, of `both`, [T, 2 H]."""
        weights, dim = self._weights, self._weights.head_dim
        qkv = functional.linear(both, weights.qkv).view(len(both), -1, dim)
        q, k, v = qkv.split((weights.heads, weights.kv_heads, weights.kv_heads), 1)
        q, k = self._turned(q, step.positions), self._turned(k, step.positions)
        self._keys.index_copy_(0, step.slots, k)
        self._values.index_copy_(0, step.slots, v)
        out, at = torch.empty_like(q), 0
        for row, before, count in zip(step.rows.tolist(), step.prefixes.tolist(), step.extends.tolist(), strict=True):
            places = step.table[row, : before + count].long()
            keys, values = (side.index_select(0, places).transpose(0, 1)[None] for side in (self._keys, self._values))
            mask = torch.ones(count, before + count, dtype=torch.bool).tril(before)
            asked = q[at : at + count].transpose(0, 1)[None]
            found = functional.scaled_dot_product_attention(
                asked, keys, values, attn_mask=mask, scale=weights.scale, enable_gqa=True
            )
            out[at : at + count] = found[0].transpose(0, 1)
            at += count
        return out.flatten(1)

    def _turned(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x [T, heads, D], turned by its positions: halves of a head are the two axes."""
        cos, sin = (side.index_select(0, positions)[:, None] for side in (self._weights.cos, self._weights.sin))
        first, second = x.float().chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
