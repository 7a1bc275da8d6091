"""A draft head computed in one call of compiled code: `decoder.cpp` with one layer, which is fed with features."""

from __future__ import annotations

from typing import Any

import torch

from core.memory.kv_pool import KVPool
from core.models.eagle.head import HeadStep
from core.models.eagle.weights import HeadWeights
from core.models.native.weights import Matrix

OWN_FEATURES = (1,)
"""What stands behind its only layer."""


class NativeHead:
    """A `core.models.eagle.head.Head`. `threads`: as for `NativeDecoder`."""

    def __init__(self, extension: Any, weights: HeadWeights, pool: KVPool, threads: int) -> None:
        self._keys, self._values = ([side(pool.layers[0].layer_id)] for side in (pool.k, pool.v))
        self._decoder = extension.Decoder(
            *(weights.heads, weights.kv_heads, weights.head_dim, weights.eps, weights.scale, threads),
            *(weights.embedding, weights.cos, weights.sin, weights.final_norm, Matrix(weights.lm_head, None, None)),
        )
        matrices = (Matrix(each, None, None) for each in (weights.qkv, weights.out, weights.gate_up, weights.down))
        self._decoder.add_layer(weights.feature_norm, weights.mlp_norm, None, None, *matrices)
        self._decoder.fuse(weights.embedding_norm, Matrix(weights.fc, None, None))

    def run(self, step: HeadStep) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Head`."""
        logits, features = self._decoder.forward(
            *(step.ids, step.positions, step.slots, step.rows),
            *(torch.from_numpy(step.prefixes), torch.from_numpy(step.extends)),
            *(step.wanted, step.table, self._keys, self._values, False, OWN_FEATURES, step.features),
        )
        return logits, features
